// The AVX2 micro-kernel: 6 rows by 16 columns in 12 accumulators; a panel is two such halves.
#pragma once

#include <immintrin.h>

#include "base/dtype.h"
#include "kernels/by_rows.inl.h"
#include "kernels/fetch.h"
#include "kernels/turn_avx2.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

struct Tile {
  static constexpr int kMaxRows = 6;

  static constexpr bool kFloats = true;    // the packed form is fp32 [k_pad][rows]
  static constexpr bool kInPieces = true;  // pieces of K may be multiplied one after the other

  static void enter() {}
  static void leave() {}

  // Even blocks: 8 rows are 4 + 4, because in 6 + 2 the second block would wait for its few chains.
  static int block_rows(int rows_left) {
    return rows_left == 0 ? 0 : ceil_div(rows_left, ceil_div(rows_left, kMaxRows));
  }
  static size_t block_bytes(int rows, int k_pad) { return sizeof(float) * rows * k_pad; }

  // [k_pad][rows] fp32
  static void pack(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
    pack_floats(row_ptrs, rows, k, k_pad, static_cast<float*>(dst));
  }

  template <int kRows>
  static void multiply_rows(const float* a, int k_pad, const uint16_t* half, float* c, int ldc,
                            bool accumulate) {
    __m256 left[kRows], right[kRows];
    for (int row = 0; row < kRows; ++row) {
      left[row] = accumulate ? _mm256_loadu_ps(c + row * ldc) : _mm256_setzero_ps();
      right[row] = accumulate ? _mm256_loadu_ps(c + row * ldc + 8) : _mm256_setzero_ps();
    }
    for (int i = 0; i < k_pad; i += 2, half += 2 * kPanel, a += 2 * kRows) {
      const auto* pairs = reinterpret_cast<const __m256i*>(half);
      const __m256 even0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs), 16));
      const __m256 even1 =
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs + 1), 16));
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256 value = _mm256_broadcast_ss(a + row);
        left[row] = _mm256_fmadd_ps(value, even0, left[row]);
        right[row] = _mm256_fmadd_ps(value, even1, right[row]);
      }
      const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
      const __m256 odd0 = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs), odd));
      const __m256 odd1 = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs + 1), odd));
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const __m256 value = _mm256_broadcast_ss(a + kRows + row);
        left[row] = _mm256_fmadd_ps(value, odd0, left[row]);
        right[row] = _mm256_fmadd_ps(value, odd1, right[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      _mm256_storeu_ps(c + row * ldc, left[row]);
      _mm256_storeu_ps(c + row * ldc + 8, right[row]);
    }
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch, float* c,
                       int ldc, bool accumulate) {
    const float* from = static_cast<const float*>(a);
    for (int half = 0; half < 2; ++half, panel += kPanel, c += kPanel / 2) {
      by_rows<kMaxRows>(rows, [&](auto count) {
        multiply_rows<decltype(count)::value>(from, k_pad, panel, c, ldc, accumulate);
      });
    }
  }
};

}  // namespace
}  // namespace hetero
