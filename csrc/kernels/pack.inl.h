// Re-pairing of bf16 panels: plain integer code that each ISA's compiler flags vectorise.
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

void repair(const uint16_t* packed, int num_panels, int k_pad, int k_block, uint16_t* panel) {
  const size_t panel_size = static_cast<size_t>(k_pad) * kPanel;
  for (int p = 0; p < num_panels; ++p) {
    const uint16_t* from = packed + p * panel_size + static_cast<size_t>(k_block) * kPanel * kPanel;
    for (int n = 0; n < kPanel; n += 2, panel += 2 * kPanel) {
      for (int pair = 0; pair < kPanel / 2; ++pair) {
        const uint16_t* two = from + (pair * kPanel + n) * 2;  // k even, k odd of n; then of n + 1
        panel[4 * pair] = two[0];
        panel[4 * pair + 1] = two[2];
        panel[4 * pair + 2] = two[1];
        panel[4 * pair + 3] = two[3];
      }
    }
  }
}

}  // namespace
}  // namespace hetero
