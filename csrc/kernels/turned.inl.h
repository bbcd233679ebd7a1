// Packing of left operands, written over Turn (turn_<isa>.h), which transposes squares of kSize
// bf16 pairs.
#pragma once

#include "kernels/kernel.h"

namespace hetero {
namespace {

// Calls emit(pair, v) for every pair of K, v holding the pairs of `rows` (at most kSize) rows in
// its lanes.
template <class Emit>
inline void turn_rows(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, Emit emit) {
  constexpr int kStep = 2 * Turn::kSize;
  for (int start = 0; start < k_pad; start += kStep) {
    const int count = k - start < kStep ? k - start : kStep;
    Turn::I square[Turn::kSize];
    for (int row = 0; row < Turn::kSize; ++row) {
      if (row >= rows || count <= 0) {
        square[row] = Turn::zero();
      } else {
        const uint16_t* from = row_ptrs[row] + start;
        square[row] = count == kStep ? Turn::load(from) : Turn::load_n(from, count);
      }
    }
    Turn::transpose(square);
    for (int pair = 0; pair < Turn::kSize; ++pair) emit(start / 2 + pair, square[pair]);
  }
}

// [k_pad][rows] fp32
inline void pack_floats(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, float* to) {
  for (int first = 0; first < rows; first += Turn::kSize) {
    const int count = rows - first < Turn::kSize ? rows - first : Turn::kSize;
    turn_rows(row_ptrs + first, count, k, k_pad, [&](int pair, Turn::I v) {
      Turn::store_n(to + 2 * pair * rows + first, Turn::even(v), count);
      Turn::store_n(to + (2 * pair + 1) * rows + first, Turn::odd(v), count);
    });
  }
}

// [k_pad/2][rows] pairs of bf16
inline void pack_pairs(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, uint32_t* to) {
  for (int first = 0; first < rows; first += Turn::kSize) {
    const int count = rows - first < Turn::kSize ? rows - first : Turn::kSize;
    turn_rows(row_ptrs + first, count, k, k_pad,
              [&](int pair, Turn::I v) { Turn::store_n(to + pair * rows + first, v, count); });
  }
}

}  // namespace
}  // namespace hetero
