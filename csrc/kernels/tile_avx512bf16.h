// The AVX512-BF16 micro-kernel: 12 rows by 32 columns in 24 accumulators, two products per lane and
// instruction.
//
// Written over Bf16Dot: the instructions (bf16dot_native.h) or plain C++ (bf16dot_emulated.h).
// Include one of them and a turn_<isa>.h first.
#pragma once

#include "base/dtype.h"
#include "kernels/by_rows.inl.h"
#include "kernels/fetch.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

struct Tile {
  static constexpr int kMaxRows = 12;

  static constexpr bool kFloats = false;
  static constexpr bool kInPieces = true;

  static void enter() {}
  static void leave() {}

  static int block_rows(int rows_left) {
    return rows_left == 0 ? 0 : ceil_div(rows_left, ceil_div(rows_left, kMaxRows));
  }
  static size_t block_bytes(int rows, int k_pad) { return sizeof(uint16_t) * rows * k_pad; }

  // [k_pad/2][rows] pairs
  static void pack(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
    pack_pairs(row_ptrs, rows, k, k_pad, static_cast<uint32_t*>(dst));
  }

  template <int kRows>
  static void multiply_rows(const uint32_t* a, int k_pad, const uint16_t* panel, Fetch fetch,
                            float* c, int ldc, bool accumulate) {
    Bf16Dot::Sum left[kRows], right[kRows];
    for (int row = 0; row < kRows; ++row) {
      left[row] = accumulate ? Bf16Dot::load(c + row * ldc) : Bf16Dot::zero();
      right[row] = accumulate ? Bf16Dot::load(c + row * ldc + 16) : Bf16Dot::zero();
    }
    for (int i = 0; i < k_pad; i += 2, panel += 2 * kPanel, a += kRows) {
      Bf16Dot::prefetch(fetch.from);
      Bf16Dot::prefetch(fetch.from + 64);
      fetch.from += fetch.step;
      const Bf16Dot::Pairs pairs0 = Bf16Dot::load_pairs(panel);
      const Bf16Dot::Pairs pairs1 = Bf16Dot::load_pairs(panel + kPanel);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const Bf16Dot::Pairs value = Bf16Dot::broadcast(a + row);
        left[row] = Bf16Dot::dot(left[row], value, pairs0);
        right[row] = Bf16Dot::dot(right[row], value, pairs1);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      Bf16Dot::store(c + row * ldc, left[row]);
      Bf16Dot::store(c + row * ldc + 16, right[row]);
    }
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch fetch,
                       float* c, int ldc, bool accumulate) {
    const uint32_t* from = static_cast<const uint32_t*>(a);
    by_rows<kMaxRows>(rows, [&](auto count) {
      multiply_rows<decltype(count)::value>(from, k_pad, panel, fetch, c, ldc, accumulate);
    });
  }
};

}  // namespace
}  // namespace hetero
