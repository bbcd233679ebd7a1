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

// Gives `product`, which computes `slots` of its expert, what is added to them.
void add_extras(Op& op, const Routing& routing, std::span<const SlotExtra> extras, SlotRange slots,
                Product& product) {
  for (int i = 0; i < 2; ++i) {
    auto* found = op.take<Extra>(extras.size());
    size_t count = 0;
    for (const SlotExtra& extra : extras) {
      if (extra.operand[i].rows == nullptr) continue;
      const SlotRange own = slots_of(routing, slots, extra.tokens);
      if (own.size() == 0) continue;
      const Operand operand = extra.operand[i].at(own.first, product.tag);
      new (&found[count++]) Extra{own.first - slots.first, own.size(), operand, extra.scale};
    }
    product.extra[i] = {found, count};
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
  auto* slots = op.take<SlotRange>(experts);
  const auto blocks_of = [&](int expert) { return (slots[expert].size() + most - 1) / most; };
  int64_t count = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const SlotRange all{routing.expert_start[expert], routing.expert_start[expert + 1]};
    slots[expert] = slots_of(routing, all, wanted.tokens);
    count += blocks_of(expert);
  }
  auto* products = op.take<Product>(count);
  count = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const int64_t begin = slots[expert].first, rows = slots[expert].size();
    const int64_t blocks = blocks_of(expert);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = begin + rows * block / blocks,
                    last = begin + rows * (block + 1) / blocks;
      Product& product = *new (&products[count++]) Product;
      product.num_rows = static_cast<int>(last - first);
      product.first = static_cast<int>(first);
      product.tag = expert;
      product.main = wanted.main.at(first, expert);
      add_extras(op, routing, wanted.extras, {first, last}, product);
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
  const int64_t first = sum.tokens.first,
                tokens = std::min(sum.tokens.end, routing.num_tokens) - first;

  if (sum.low_rank.matrix.data == nullptr) {
    constexpr int64_t kTokens = 16;  // per task
    context.parallel((tokens + kTokens - 1) / kTokens, [&](int64_t task, int thread) {
      const Addends to = addends(thread);
      float* row = sums + static_cast<size_t>(thread) * width_pad;
      const int64_t end = first + std::min(tokens, (task + 1) * kTokens);
      for (int64_t token = first + task * kTokens; token < end; ++token) {
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
      const int64_t token = first + product.first + row;
      const int count = gather(routing, sum, token, column, to);
      kernels.weighted_sum(to.rows, to.weights, count, columns, total);
      kernels.add_scaled(c, sum.scale, total, kPanel);
      kernels.store_tile(total, 1, columns, out_at(sum, token, column), 0, sum.dtype);
    }
  };
  const Operand low_rank{sum.low_rank.rows + first, sum.low_rank.matrix};
  const auto products = row_blocks(context, op, low_rank, tokens, sum.direction);
  multiply(context, products, sum.direction, 1, add);
}

}  // namespace hetero
