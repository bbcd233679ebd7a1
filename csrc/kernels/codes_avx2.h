// Codes of eight lanes (AVX2 and F16C). The contract is in codes_scalar.h.
#pragma once

#include <immintrin.h>

#include "kernels/vec_avx2.h"

namespace hetero {
namespace {

struct Codes {
  using F = __m256;
  using I = __m256i;
  struct Table {
    __m256 low, high;
  };

  static Table table(const float* values) {
    return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
  }
  template <class Map>
  static Table table(const float* values, float*, const Map& map) {
    return {map(_mm256_loadu_ps(values)), map(_mm256_loadu_ps(values + 8))};
  }
  static I load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static F pick(I index, const Table& table) {
    // The permutation takes three bits; the fourth, moved to the sign, chooses the half.
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index),
                            _mm256_permutevar8x32_ps(table.high, index),
                            _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  // The odd ones come from the lower half of 64 bits into the upper one.
  static I nibbles(const std::byte* p, int) {
    int four;
    memcpy(&four, p, sizeof(four));
    const __m256i v = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
    return _mm256_or_si256(v, _mm256_slli_epi64(v, 28));
  }
  static F from_int8(const void* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(p))); }
  // The byte becomes the lowest bits of the mantissa of 2^23.
  static F from_digit(I word) {
    const __m256i magic = _mm256_castps_si256(_mm256_set1_ps(8388608.0f));
    const __m256i bits = _mm256_or_si256(_mm256_and_si256(word, _mm256_set1_epi32(255)), magic);
    return _mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(8388608.0f + 128.0f));
  }
  // The bits of e4m3 are those of a half 256 times smaller.
  static F from_e4m3(const void* p) {
    const __m128i high = _mm_slli_epi16(_mm_cvtepu8_epi16(bytes(p)), 8);
    return _mm256_cvtph_ps(
        _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<short>(0xbfff))));
  }

  static F scale_odd(const uint16_t* p) {
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(p)), 15);
    return _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x4000)));
  }
  static F scale_f16(const uint16_t* p) { return _mm256_cvtph_ps(halves(p)); }
  static F scale_e8m0(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes(p)), 23));
  }

  static F bump(F v) { return number(add(bits(v), set(0x8000))); }
  static F bump_even(F v) {
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 16), _mm256_set1_epi32(1));
    return number(add(bits(v), add(odd, set(0x7fff))));
  }
  static void store_pairs(uint16_t* p, F even, F odd) {
    const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
    const __m256i high = _mm256_and_si256(_mm256_castps_si256(odd), high_half());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(low, high));
  }
  [[gnu::always_inline]] static void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
  }

  static I bits(F v) { return _mm256_castps_si256(v); }
  static F number(I v) { return _mm256_castsi256_ps(v); }
  static I integer(F v) { return _mm256_cvttps_epi32(v); }
  static I set(int v) { return _mm256_set1_epi32(v); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  template <int kBits>
  static I left(I v) {
    return _mm256_slli_epi32(v, kBits);
  }
  template <int kBits>
  static I right(I v) {
    return _mm256_srli_epi32(v, kBits);
  }
  static void store_words(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
  static void store_halves(void* p, I v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), low_halves(v));
  }
  static void store_bytes(void* p, I v) {
    const __m128i low = _mm_and_si128(low_halves(v), _mm_set1_epi16(0xff));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(low, low));
  }

 private:
  static __m128i bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  // The low half of every lane.
  static __m128i low_halves(__m256i v) {
    const __m256i low = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08));
  }
  static __m128i halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i high_half() { return _mm256_set1_epi32(static_cast<int>(0xffff0000u)); }
};

}  // namespace
}  // namespace hetero
