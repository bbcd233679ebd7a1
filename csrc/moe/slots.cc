#include "moe/slots.h"

#include <algorithm>

#include "base/dtype.h"

namespace hetero {
namespace {

// The slots of one token, as pointers into values, with their factors.
struct Addends {
  const float** rows;
  float* weights;
};

int gather(const Routing& routing, const TokenSum& sum, int64_t token, int column,
           const Addends& to) {
  const int64_t begin = routing.token_start[token], end = routing.token_start[token + 1];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = routing.token_slots[i];
    to.rows[i - begin] = sum.values + slot * sum.ld + column;
    to.weights[i - begin] = sum.weighted ? routing.weight[slot] : 1.0f;
  }
  return static_cast<int>(end - begin);
}

std::byte* out_at(const TokenSum& sum, int64_t token, int column) {
  const int64_t element = token * sum.width + column;
  return static_cast<std::byte*>(sum.out) + element * (sum.dtype == Dtype::kBf16 ? 2 : 4);
}

void store(const KernelSet& kernels, const TokenSum& sum, const float* row, int64_t token) {
  if (sum.dtype == Dtype::kBf16) {
    kernels.to_bf16(row, reinterpret_cast<uint16_t*>(out_at(sum, token, 0)), sum.width);
  } else {
    std::copy(row, row + sum.width, reinterpret_cast<float*>(out_at(sum, token, 0)));
  }
}

}  // namespace

const uint16_t** rows_by_slot(Op& op, const Routing& routing, const uint16_t* values,
                              int64_t stride) {
  const int64_t slots = routing.num_slots();
  auto** rows = op.take<const uint16_t*>(slots);
  for (int64_t slot = 0; slot < slots; ++slot) rows[slot] = values + slot * stride;
  return rows;
}

const uint16_t** rows_by_token(Op& op, const Routing& routing, const uint16_t* values,
                               int64_t stride) {
  const int64_t slots = routing.num_slots();
  auto** rows = op.take<const uint16_t*>(slots);
  for (int64_t slot = 0; slot < slots; ++slot) rows[slot] = values + routing.token[slot] * stride;
  return rows;
}

void multiply_slots(Context& context, const Routing& routing, const SlotProducts& wanted,
                    TileRef done) {
  Op op(context);
  const Matrix& matrix = wanted.main.matrix;
  const int64_t most =
      max_rows(context, wanted.direction == Direction::kForward ? matrix.k_pad() : matrix.n_pad());
  const int experts = static_cast<int>(routing.expert_start.size()) - 1;
  int64_t count = 0;
  const auto blocks_of = [&](int expert) {
    return (routing.expert_start[expert + 1] - routing.expert_start[expert] + most - 1) / most;
  };
  for (int expert = 0; expert < experts; ++expert) count += blocks_of(expert);
  auto* products = op.take<Product>(count);
  count = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const int64_t begin = routing.expert_start[expert],
                  rows = routing.expert_start[expert + 1] - begin;
    const int64_t blocks = blocks_of(expert);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = begin + rows * block / blocks,
                    last = begin + rows * (block + 1) / blocks;
      Product& product = *new (&products[count++]) Product;
      product.num_rows = static_cast<int>(last - first);
      product.first = static_cast<int>(first);
      product.tag = expert;
      product.scale = wanted.scale;
      product.main = wanted.main.at(first, expert);
      for (int i = 0; i < 2; ++i) {
        if (wanted.extra[i].rows != nullptr) product.extra[i] = wanted.extra[i].at(first, expert);
      }
    }
  }
  multiply(context, {products, static_cast<size_t>(count)}, wanted.direction, wanted.group, done);
}

void sum_tokens(Context& context, const Routing& routing, const TokenSum& sum) {
  const KernelSet& kernels = context.kernels();
  Op op(context);
  const int threads = context.num_threads();
  auto** rows = op.take<const float*>(static_cast<size_t>(threads) * routing.top_k);
  auto* weights = op.take<float>(static_cast<size_t>(threads) * routing.top_k);
  const auto addends = [&](int thread) {
    return Addends{rows + static_cast<int64_t>(thread) * routing.top_k,
                   weights + static_cast<int64_t>(thread) * routing.top_k};
  };
  const int width_pad = round_up(sum.width, kPanel);
  auto* sums = op.take<float>(static_cast<size_t>(threads) * width_pad);

  if (sum.low_rank.matrix.data == nullptr) {
    constexpr int64_t kTokens = 16;  // per task
    context.parallel((routing.num_tokens + kTokens - 1) / kTokens, [&](int64_t task, int thread) {
      const Addends to = addends(thread);
      float* row = sums + static_cast<size_t>(thread) * width_pad;
      const int64_t end = std::min(routing.num_tokens, (task + 1) * kTokens);
      for (int64_t token = task * kTokens; token < end; ++token) {
        const int count = gather(routing, sum, token, 0, to);
        kernels.weighted_sum(to.rows, to.weights, count, sum.width, row);
        store(kernels, sum, row, token);
      }
    });
    return;
  }

  // The low-rank part is one product over all tokens; each of its tiles is added to the sums of the
  // same columns.
  const auto add = [&](const Product& product, int tile, float* c, int thread) {
    const int column = tile * kPanel, columns = std::min(kPanel, sum.width - column);
    const Addends to = addends(thread);
    for (int row = 0; row < product.num_rows; ++row, c += kPanel) {
      float total[kPanel] = {};
      const int count = gather(routing, sum, product.first + row, column, to);
      kernels.weighted_sum(to.rows, to.weights, count, columns, total);
      kernels.add_scaled(c, sum.scale, total, kPanel);
      kernels.store_tile(total, 1, columns, out_at(sum, product.first + row, column), 0, sum.dtype);
    }
  };
  const auto products = row_blocks(context, op, sum.low_rank, routing.num_tokens, sum.direction);
  multiply(context, products, sum.direction, 1, add);
}

}  // namespace hetero
