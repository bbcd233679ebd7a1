#include "ops/linear.h"

#include <algorithm>

#include "base/dtype.h"
#include "ops/outer.h"

namespace hetero {
namespace {

size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kBf16 ? 2 : 4; }

// bias [n] followed by zeros up to a multiple of 32, so that whole tiles can be added.
const float* padded_bias(Op& op, const float* bias, int n) {
  if (bias == nullptr || n % kPanel == 0) return bias;
  auto* padded = op.take<float>(round_up(n, kPanel));
  std::fill(std::copy(bias, bias + n, padded), padded + round_up(n, kPanel), 0.0f);
  return padded;
}

}  // namespace

void multiply_rows(Context& context, const RowJob& job) {
  const KernelSet& kernels = context.kernels();
  Op op(context);
  const auto products = row_blocks(context, op, job.main, job.num_rows, job.direction);
  for (Product& product : products) {
    product.extra[0] = extras_within(op, job.extras, product.first, product.num_rows);
  }
  const float* bias = padded_bias(op, job.bias, job.width);
  const auto store = [&](const Product& product, int tile, float* c, int) {
    const int column = tile * kPanel;
    if (bias != nullptr) kernels.add_bias(c, product.num_rows, bias + column);
    auto* out = static_cast<std::byte*>(job.out) +
                dtype_bytes(job.dtype) * (product.first * job.ld + column);
    const int columns = std::min(kPanel, job.width - column);
    kernels.store_tile(c, product.num_rows, columns, out, job.ld, job.dtype);
  };
  multiply(context, products, job.direction, 1, store);
}

const uint16_t** row_pointers(Op& op, const uint16_t* first, int64_t count, int64_t stride) {
  auto** rows = op.take<const uint16_t*>(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = first + i * stride;
  return rows;
}

void linear(Context& context, const Linear& args) {
  Op op(context);
  RowJob job;
  job.main = {row_pointers(op, args.x, args.num_rows, args.weight.k), args.weight};
  job.num_rows = args.num_rows;
  auto* extras = op.take<Extra>(args.lora.size());
  for (size_t i = 0; i < args.lora.size(); ++i) {
    const LowRank& lora = args.lora[i];
    RowJob inner;
    inner.main = {job.main.rows + lora.first, lora.a};
    inner.num_rows = lora.num_rows;
    inner.out = lora.xa;
    inner.ld = inner.width = lora.a.n_pad();
    multiply_rows(context, inner);
    const Operand low{row_pointers(op, lora.xa, lora.num_rows, lora.a.n_pad()), lora.b};
    new (&extras[i]) Extra{lora.first, lora.num_rows, low, lora.scale};
  }
  job.extras = {extras, args.lora.size()};
  job.bias = args.bias;
  job.out = args.out;
  job.ld = job.width = args.weight.n;
  job.dtype = args.out_dtype;
  multiply_rows(context, job);
}

void linear_backward(Context& context, const LinearBackward& args) {
  Op op(context);
  RowJob job;
  job.direction = Direction::kTransposed;
  job.main = {row_pointers(op, args.dout, args.num_rows, args.weight.n), args.weight};
  job.num_rows = args.num_rows;
  const uint16_t** dxa_rows = nullptr;
  Extra extra;
  if (args.lora != nullptr) {
    const LowRank& lora = *args.lora;
    const int rank_pad = lora.a.n_pad();
    auto* dxa = op.take<uint16_t>(args.num_rows * rank_pad);  // dout B, unscaled
    RowJob inner = job;
    inner.main.matrix = lora.b;
    inner.out = dxa;
    inner.ld = inner.width = rank_pad;
    multiply_rows(context, inner);
    dxa_rows = row_pointers(op, dxa, args.num_rows, rank_pad);
    extra = {0, args.num_rows, {dxa_rows, lora.a}, lora.scale};
    job.extras = {&extra, 1};
  }
  if (args.dx != nullptr) {
    job.out = args.dx;
    job.ld = job.width = args.weight.k;
    job.dtype = args.dx_dtype;
    multiply_rows(context, job);
  }
  if (args.lora == nullptr) return;
  const LowRank& lora = *args.lora;
  const int rank = lora.a.n, rows = static_cast<int>(args.num_rows);
  if (args.da != nullptr) {
    const OuterSum sum = {dxa_rows, row_pointers(op, args.x, rows, args.weight.k), rows, args.da};
    add_outer_sums(context, {&sum, 1}, {rank, args.weight.k, lora.scale, args.weight.k, 1});
  }
  if (args.db != nullptr) {
    const OuterSum sum = {row_pointers(op, lora.xa, rows, lora.a.n_pad()), job.main.rows, rows,
                          args.db};
    add_outer_sums(context, {&sum, 1}, {rank, args.weight.n, lora.scale, 1, rank});
  }
}

}  // namespace hetero
