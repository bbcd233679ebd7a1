// Vec of eight lanes (AVX2 + FMA). See vec_avx512.h for the contract.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/vec_math.inl.h"

namespace hetero {
namespace {

struct VecAvx2 {
  using F = __m256;
  static constexpr int kLanes = 8;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float v) { return _mm256_set1_ps(v); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static void store_n(float* p, F v, int n) { _mm256_maskstore_ps(p, first(n), v); }
  static F load_bf16(const uint16_t* p) {
    return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_bf16_n(const uint16_t* p, int n) {
    alignas(16) uint16_t b[8] = {};
    for (int i = 0; i < n && i < 8; ++i) b[i] = p[i];
    return widen(_mm_load_si128(reinterpret_cast<const __m128i*>(b)));
  }
  static void store_bf16(uint16_t* p, F v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v));
  }
  static void store_bf16_n(uint16_t* p, F v, int n) {
    alignas(16) uint16_t b[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(b), narrow(v));
    for (int i = 0; i < n && i < 8; ++i) p[i] = b[i];
  }
  static F round_bf16(F v) { return _mm256_castsi256_ps(_mm256_slli_epi32(high_half(v), 16)); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
  static F copysign(F magnitude, F sign) {
    return _mm256_or_ps(abs(magnitude), _mm256_and_ps(set1(-0.0f), sign));
  }
  static F select_gt(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  static F head(F v, F fill, int n) {
    return _mm256_blendv_ps(fill, v, _mm256_castsi256_ps(first(n)));
  }
  static F scale2(F m, F n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return mul(m, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
  }
  static float sum(F v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float hmax(F v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static F exp(F x) { return exp_of<VecAvx2>(x); }

 private:
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F widen(__m128i b) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
  }
  static __m128i narrow(F v) {
    const __m256i r = high_half(v);
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  }
  // The bf16 nearest to v in the low half of every lane.
  static __m256i high_half(F v) {
    const __m256i b = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    r = _mm256_srli_epi32(r, 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  }
};

}  // namespace
}  // namespace hetero
