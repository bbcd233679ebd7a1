// Bf16Dot: the instructions of the AVX512-BF16 tile.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace hetero {
namespace {

struct Bf16Dot {
  using Sum = __m512;     // 16 fp32
  using Pairs = __m512i;  // 16 pairs of bf16

  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Sum v) { _mm512_storeu_ps(p, v); }
  static Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static Pairs broadcast(const uint32_t* pair) {
    return _mm512_set1_epi32(static_cast<int>(*pair));
  }
  static void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
  // sum += a.odd * b.odd, then a.even * b.even, in every lane
  static Sum dot(Sum sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

}  // namespace
}  // namespace hetero
