// Building blocks that forward and backward share: products over the slots of a chunk, and sums
// over a token's slots.
#pragma once

#include "moe/saved.h"

namespace hetero {

// Rows of `values` [.., stride], one pointer per slot: row `slot`, or row `token of the slot`.
const uint16_t** rows_by_slot(Op& op, const Routing& routing, const uint16_t* values,
                              int64_t stride);
const uint16_t** rows_by_token(Op& op, const Routing& routing, const uint16_t* values,
                               int64_t stride);

// One operand of every slot: its row, and its expert's matrix (a stack), or the only one.
struct SlotOperand {
  const uint16_t* const* rows = nullptr;
  Matrix matrix;
  bool shared = false;
  int64_t step = 0;  // elements from one expert's matrix to the next; 0: they are adjacent

  Operand at(int64_t slot, int expert) const {
    Matrix own = matrix;
    if (!shared) own.data += expert * (step != 0 ? step : static_cast<int64_t>(matrix.size()));
    return {rows + slot, own};
  }
};

// What is added to the slots of some tokens, scaled: the low-rank part of an adapter's LoRA.
struct SlotExtra {
  TokenRange tokens;
  SlotOperand operand[2];  // the j-th tile of a group takes operand[j], if it has rows
  float scale = 1.0f;
};

struct SlotProducts {
  SlotOperand main;
  std::span<const SlotExtra> extras;
  TokenRange tokens;  // whose slots are computed
  Direction direction = Direction::kForward;
  int group = 1;
};

// Every slot's row times its expert's matrix, which is read once for all of them. `done` sees
// Product::first (slot) and Product::tag (expert).
void multiply_slots(Context& context, const Routing& routing, const SlotProducts& products,
                    TileRef done);

// out[t] = sum over the slots of t, ascending, of (weighted ? weight : 1) * values[slot], plus
// scale * rows[t] M when `low_rank` has data (its rows are per token, all tokens' of the chunk).
struct TokenSum {
  TokenRange tokens;
  const float* values = nullptr;  // [S, ld]
  int64_t ld = 0;
  int width = 0;
  bool weighted = true;
  Operand low_rank;
  float scale = 1.0f;
  Direction direction = Direction::kForward;
  void* out = nullptr;  // [T, width]
  Dtype dtype = Dtype::kBf16;
};

void sum_tokens(Context& context, const Routing& routing, const TokenSum& sum);

}  // namespace hetero
