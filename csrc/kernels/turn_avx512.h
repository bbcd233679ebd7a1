// Turn for AVX-512: squares of 16 by 16. The contract is in turn_scalar.h.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace hetero {
namespace {

struct Turn {
  static constexpr int kSize = 16;
  using I = __m512i;

  static I zero() { return _mm512_setzero_si512(); }
  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static I load_n(const uint16_t* p, int n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (1u << n) - 1u, p);
  }
  static void store(void* p, I v) { _mm512_storeu_si512(p, v); }

  static void fours(I* r) {
    const I a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const I c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
  }
  static void transpose(I* r) {
#pragma GCC unroll 4
    for (int group = 0; group < 16; group += 4) fours(r + group);
    // r[4 g + c] holds in lane l column 4 l + c of the rows 4 g to 4 g + 3.
    I t[16];
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);      // lanes 0, 2 of groups 0, 1
      t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);  // lanes 1, 3
      t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
      t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
      r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
      r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
      r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
    }
  }

  static I flip(I v, uint32_t bits) {
    return _mm512_xor_si512(v, _mm512_set1_epi32(static_cast<int>(bits)));
  }

  static I low16(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
  static I high16(I a, I b) { return _mm512_unpackhi_epi16(a, b); }

  static I even(I v) { return _mm512_slli_epi32(v, 16); }
  static I odd(I v) {
    return _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  }
  static void store_n(void* p, I v, int n) {
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1u), v);
  }
};

}  // namespace
}  // namespace hetero
