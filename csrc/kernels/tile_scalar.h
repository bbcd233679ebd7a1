// The micro-kernel in plain C++: 4 rows by 32 columns, for any processor, and the meaning of all
// others.
#pragma once

#include "base/dtype.h"
#include "kernels/fetch.h"
#include "kernels/turn_scalar.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

// The product of two bf16 is exact in fp32, so a multiply and an add give the bits of a fused
// multiply-add.
struct Tile {
  static constexpr int kMaxRows = 4;

  static constexpr bool kFloats = true;    // the packed form is fp32 [k_pad][rows]
  static constexpr bool kInPieces = true;  // pieces of K may be multiplied one after the other

  static void enter() {}
  static void leave() {}

  static int block_rows(int rows_left) { return rows_left < kMaxRows ? rows_left : kMaxRows; }
  static size_t block_bytes(int rows, int k_pad) { return sizeof(float) * rows * k_pad; }

  // [k_pad][rows] fp32
  static void pack(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
    pack_floats(row_ptrs, rows, k, k_pad, static_cast<float*>(dst));
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch, float* c,
                       int ldc, bool accumulate) {
    const float* from = static_cast<const float*>(a);
    float sum[kMaxRows][kPanel] = {};
    for (int row = 0; accumulate && row < rows; ++row) {
      for (int col = 0; col < kPanel; ++col) sum[row][col] = c[row * ldc + col];
    }
    for (int i = 0; i < k_pad; i += 2, panel += 2 * kPanel, from += 2 * rows) {
      float even[kPanel], odd[kPanel];
      for (int col = 0; col < kPanel; ++col) {
        even[col] = bf16_to_float(panel[2 * col]);
        odd[col] = bf16_to_float(panel[2 * col + 1]);
      }
      for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < kPanel; ++col) sum[row][col] += from[row] * even[col];
        for (int col = 0; col < kPanel; ++col) sum[row][col] += from[rows + row] * odd[col];
      }
    }
    for (int row = 0; row < rows; ++row) {
      for (int col = 0; col < kPanel; ++col) c[row * ldc + col] = sum[row][col];
    }
  }
};

}  // namespace
}  // namespace hetero
