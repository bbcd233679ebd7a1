// Turn for AVX2: squares of 8 by 8. The contract is in turn_scalar.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace hetero {
namespace {

struct Turn {
  static constexpr int kSize = 8;
  using I = __m256i;

  static I zero() { return _mm256_setzero_si256(); }
  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I load_n(const uint16_t* p, int n) {
    alignas(32) uint16_t padded[16] = {};
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    return load(padded);
  }
  static void store(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

  static void fours(I* r) {
    const I a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
    const I c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm256_unpacklo_epi64(a, c);
    r[1] = _mm256_unpackhi_epi64(a, c);
    r[2] = _mm256_unpacklo_epi64(b, d);
    r[3] = _mm256_unpackhi_epi64(b, d);
  }
  static void transpose(I* r) {
    fours(r);
    fours(r + 4);
    for (int i = 0; i < 4; ++i) {
      const I low = r[i], high = r[i + 4];
      r[i] = _mm256_permute2x128_si256(low, high, 0x20);
      r[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
  }

  static I flip(I v, uint32_t bits) {
    return _mm256_xor_si256(v, _mm256_set1_epi32(static_cast<int>(bits)));
  }

  static I low16(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
  static I high16(I a, I b) { return _mm256_unpackhi_epi16(a, b); }

  static I even(I v) { return _mm256_slli_epi32(v, 16); }
  static I odd(I v) {
    return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  }
  static void store_n(void* p, I v, int n) {
    const I lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const I mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
    _mm256_maskstore_epi32(static_cast<int*>(p), mask, v);
  }
};

}  // namespace
}  // namespace hetero
