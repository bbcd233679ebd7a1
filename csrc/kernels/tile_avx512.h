// The AVX-512 micro-kernel: 12 rows by 32 columns in 24 accumulators, fp32 fused multiply-adds.
#pragma once

#include <immintrin.h>

#include "base/dtype.h"
#include "kernels/by_rows.inl.h"
#include "kernels/fetch.h"
#include "kernels/turn_avx512.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

struct Tile {
  static constexpr int kMaxRows = 12;

  static constexpr bool kFloats = true;    // the packed form is fp32 [k_pad][rows]
  static constexpr bool kInPieces = true;  // pieces of K may be multiplied one after the other

  static void enter() {}
  static void leave() {}

  // Even blocks: 16 rows are 8 + 8, because 12 + 4 would leave the second block waiting for its few
  // chains.
  static int block_rows(int rows_left) {
    return rows_left == 0 ? 0 : ceil_div(rows_left, ceil_div(rows_left, kMaxRows));
  }
  static size_t block_bytes(int rows, int k_pad) { return sizeof(float) * rows * k_pad; }

  // [k_pad][rows] fp32
  static void pack(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
    pack_floats(row_ptrs, rows, k, k_pad, static_cast<float*>(dst));
  }

  template <int kRows>
  static void multiply_rows(const float* a, int k_pad, const uint16_t* panel, Fetch fetch, float* c,
                            int ldc, bool accumulate) {
    __m512 left[kRows], right[kRows];
    for (int row = 0; row < kRows; ++row) {
      left[row] = accumulate ? _mm512_loadu_ps(c + row * ldc) : _mm512_setzero_ps();
      right[row] = accumulate ? _mm512_loadu_ps(c + row * ldc + 16) : _mm512_setzero_ps();
    }
    const __m512i odd_mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (int i = 0; i < k_pad; i += 2, panel += 2 * kPanel, a += 2 * kRows) {
      _mm_prefetch(fetch.from, _MM_HINT_T1);
      _mm_prefetch(fetch.from + 64, _MM_HINT_T1);
      fetch.from += fetch.step;
      const __m512i pairs0 = _mm512_loadu_si512(panel);
      const __m512i pairs1 = _mm512_loadu_si512(panel + kPanel);
      const __m512 even0 = _mm512_castsi512_ps(_mm512_slli_epi32(pairs0, 16));
      const __m512 even1 = _mm512_castsi512_ps(_mm512_slli_epi32(pairs1, 16));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const __m512 value = _mm512_set1_ps(a[row]);
        left[row] = _mm512_fmadd_ps(value, even0, left[row]);
        right[row] = _mm512_fmadd_ps(value, even1, right[row]);
      }
      const __m512 odd0 = _mm512_castsi512_ps(_mm512_and_si512(pairs0, odd_mask));
      const __m512 odd1 = _mm512_castsi512_ps(_mm512_and_si512(pairs1, odd_mask));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const __m512 value = _mm512_set1_ps(a[kRows + row]);
        left[row] = _mm512_fmadd_ps(value, odd0, left[row]);
        right[row] = _mm512_fmadd_ps(value, odd1, right[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      _mm512_storeu_ps(c + row * ldc, left[row]);
      _mm512_storeu_ps(c + row * ldc + 16, right[row]);
    }
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch fetch,
                       float* c, int ldc, bool accumulate) {
    const float* from = static_cast<const float*>(a);
    by_rows<kMaxRows>(rows, [&](auto count) {
      multiply_rows<decltype(count)::value>(from, k_pad, panel, fetch, c, ldc, accumulate);
    });
  }
};

}  // namespace
}  // namespace hetero
