// Re-pairing of bf16 panels.
#pragma once

#include "base/dtype.h"
#include "kernels/kernel.h"

namespace hetero {
namespace {

void pack_rows(const uint16_t* const* row_ptrs, int rows, int n, int n_off, uint16_t* panel) {
  const int columns = n - n_off < kPanel ? n - n_off : kPanel;
  const int padded = round_up(rows, kPanel);
  for (int row = 0; row < padded; row += 2, panel += 2 * kPanel) {
    if (row + 1 < rows && columns == kPanel) {
      const uint16_t* even = row_ptrs[row] + n_off;
      const uint16_t* odd = row_ptrs[row + 1] + n_off;
      for (int col = 0; col < kPanel; ++col) {
        panel[2 * col] = even[col];
        panel[2 * col + 1] = odd[col];
      }
      continue;
    }
    for (int col = 0; col < kPanel; ++col) {
      const bool inside = col < columns;
      panel[2 * col] = inside && row < rows ? row_ptrs[row][n_off + col] : 0;
      panel[2 * col + 1] = inside && row + 1 < rows ? row_ptrs[row + 1][n_off + col] : 0;
    }
  }
}

// The row of pairs that has to stand at position j of a square so that, after the transposition,
// the low halves of every 128 bits hold the first half of K in order, and the high halves the
// second: low16 and high16 of two rows then give finished vectors.
inline int pair_at(int j) {
  const int lane = j / 4, position = j % 4;
  return 2 * lane + (position < 2 ? position : Turn::kSize / 2 + position - 2);
}

// One square of a panel, [16 pairs of K][32 columns][2] -> [16 pairs of columns][32 of K][2].
inline void repair_square(const uint16_t* from, uint16_t* panel) {
  constexpr int kSize = Turn::kSize, kPairs = kPanel / 2;
  for (int n = 0; n < kPanel; n += kSize) {
    for (int pair = 0; pair < kPairs; pair += kSize) {
      Turn::I square[kSize];
      for (int j = 0; j < kSize; ++j) {
        square[j] = Turn::load(from + ((pair + pair_at(j)) * kPanel + n) * 2);
      }
      Turn::transpose(square);
      for (int j = 0; j < kSize; j += 2) {
        uint16_t* to = panel + (n + j) * kPanel + 4 * pair;
        Turn::store(to, Turn::low16(square[j], square[j + 1]));
        Turn::store(to + 2 * kSize, Turn::high16(square[j], square[j + 1]));
      }
    }
  }
}

void repair(const uint16_t* packed, int num_panels, int k_pad, int k_block, uint16_t* panel) {
  const size_t panel_size = static_cast<size_t>(k_pad) * kPanel;
  const uint16_t* from = packed + static_cast<size_t>(k_block) * kPanel * kPanel;
  for (int p = 0; p < num_panels; ++p, from += panel_size, panel += kPanel * kPanel) {
    repair_square(from, panel);
  }
}

}  // namespace
}  // namespace hetero
