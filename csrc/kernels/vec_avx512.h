// Vec of sixteen lanes (AVX-512 F/BW/VL/DQ).
//
// The contract of every Vec, which the row kernels are written against:
//
// load_n and load_bf16_n read n elements and put 0 in the other lanes; store_n and store_bf16_n
// write n elements.
//
// bf16 is rounded to nearest even, NaN becomes 0x7fc0.
//
// max(a, b) = a > b ? a : b and min(a, b) = a < b ? a : b: the second operand when either is NaN.
//
// head(v, fill, n) keeps the first n lanes of v and takes fill in the others.
//
// scale2(m, n) = m 2^n for integer-valued n from -126 to 127.
//
// sum and hmax reduce in one fixed tree.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "kernels/vec_math.inl.h"

namespace hetero {
namespace {

struct VecAvx512 {
  using F = __m512;
  static constexpr int kLanes = 16;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float v) { return _mm512_set1_ps(v); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static void store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
  static F load_bf16(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_bf16_n(const uint16_t* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p));
  }
  static void store_bf16(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v));
  }
  static void store_bf16_n(uint16_t* p, F v, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(v));
  }
  static F round_bf16(F v) { return _mm512_castsi512_ps(_mm512_slli_epi32(high_half(v), 16)); }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_andnot_ps(set1(-0.0f), a); }
  static F copysign(F magnitude, F sign) {
    return _mm512_or_ps(abs(magnitude), _mm512_and_ps(set1(-0.0f), sign));
  }
  static F select_gt(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
  }
  static F head(F v, F fill, int n) { return _mm512_mask_blend_ps(first(n), fill, v); }
  static F scale2(F m, F n) { return _mm512_scalef_ps(m, n); }
  static float sum(F v) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
  }
  static float hmax(F v) {
    const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
  }
  static F exp(F x) { return exp_of<VecAvx512>(x); }

 private:
  static __mmask16 first(int n) {
    return n >= 16 ? __mmask16{0xffff} : static_cast<__mmask16>((1u << (n > 0 ? n : 0)) - 1u);
  }
  static F widen(__m256i b) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
  }
  static __m256i narrow(F v) { return _mm512_cvtepi32_epi16(high_half(v)); }
  // The bf16 nearest to v in the low half of every lane.
  static __m512i high_half(F v) {
    const __m512i b = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_srli_epi32(r, 16);
    return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7fc0));
  }
};

}  // namespace
}  // namespace hetero
