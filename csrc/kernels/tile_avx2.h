// The AVX2 micro-kernel: 6 rows by 16 columns in 12 accumulators, a panel being two such halves, or
// 3 rows by 32.
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

  // kVectors vectors of columns from `panel` on, two at a time: more would not leave registers for
  // the rows.
  template <int kRows, int kVectors>
  static void multiply_rows(const float* a, int k_pad, const uint16_t* panel, Fetch fetch, float* c,
                            int ldc, bool accumulate) {
    __m256 sums[kRows][kVectors];
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kVectors; ++i) {
        sums[row][i] = accumulate ? _mm256_loadu_ps(c + row * ldc + 8 * i) : _mm256_setzero_ps();
      }
    }
    for (int i = 0; i < k_pad; i += 2, panel += 2 * kPanel, a += 2 * kRows) {
      for (int line = 0; line < kVectors / 2; ++line) {
        _mm_prefetch(fetch.from + 64 * line, _MM_HINT_T1);
      }
      fetch.from += fetch.step;
#pragma GCC unroll 2
      for (int first = 0; first < kVectors; first += 2) {
        const auto* pairs = reinterpret_cast<const __m256i*>(panel) + first;
        const __m256 even0 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs), 16));
        const __m256 even1 =
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs + 1), 16));
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const __m256 value = _mm256_broadcast_ss(a + row);
          sums[row][first] = _mm256_fmadd_ps(value, even0, sums[row][first]);
          sums[row][first + 1] = _mm256_fmadd_ps(value, even1, sums[row][first + 1]);
        }
        const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        const __m256 odd0 = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs), odd));
        const __m256 odd1 =
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs + 1), odd));
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const __m256 value = _mm256_broadcast_ss(a + kRows + row);
          sums[row][first] = _mm256_fmadd_ps(value, odd0, sums[row][first]);
          sums[row][first + 1] = _mm256_fmadd_ps(value, odd1, sums[row][first + 1]);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(c + row * ldc + 8 * i, sums[row][i]);
    }
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch fetch,
                       float* c, int ldc, bool accumulate) {
    const float* from = static_cast<const float*>(a);
    // Few rows have few chains of their own: whole panels give them more, and are read once.
    const bool whole = by_rows<kMaxRows / 2>(rows, [&](auto count) {
      multiply_rows<decltype(count)::value, 4>(from, k_pad, panel, fetch, c, ldc, accumulate);
    });
    for (int half = 0; half < 2 && !whole; ++half, panel += kPanel, c += kPanel / 2) {
      by_rows<kMaxRows>(rows, [&](auto count) {
        multiply_rows<decltype(count)::value, 2>(from, k_pad, panel, fetch, c, ldc, accumulate);
      });
      fetch.from += 64;
    }
  }
};

}  // namespace
}  // namespace hetero
