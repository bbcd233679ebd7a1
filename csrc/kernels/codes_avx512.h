// Codes of sixteen lanes (AVX-512). The contract is in codes_scalar.h.
#pragma once

#include <immintrin.h>

#include "kernels/vec_avx512.h"

namespace hetero {
namespace {

struct Codes {
  using F = __m512;
  using I = __m512i;
  using Table = __m512;

  static Table table(const float* values) { return _mm512_loadu_ps(values); }
  template <class Map>
  static Table table(const float* values, float*, const Map& map) {
    return map(_mm512_loadu_ps(values));
  }
  static I load_words(const void* p) { return _mm512_loadu_si512(p); }
  static F pick(I index, Table table) { return _mm512_permutexvar_ps(index, table); }
  // The odd ones come from the lower half of 64 bits into the upper one.
  static I nibbles(const std::byte* p, int) {
    const __m512i v = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm512_or_si512(v, _mm512_slli_epi64(v, 28));
  }
  static F from_int8(const void* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p))); }
  // The byte becomes the lowest bits of the mantissa of 2^23.
  static F from_digit(I word) {
    const __m512 magic = _mm512_set1_ps(8388608.0f);
    // (word & 255) | magic
    const __m512i bits =
        _mm512_ternarylogic_epi32(word, _mm512_set1_epi32(255), _mm512_castps_si512(magic), 0xea);
    return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(8388608.0f + 128.0f));
  }
  // The bits of e4m3 are those of a half 256 times smaller.
  static F from_e4m3(const void* p) {
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes(p)), 8);
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(high, 1),
                                            _mm256_set1_epi16(static_cast<short>(0xbfff))));
  }

  static F scale_odd(const uint16_t* p) {
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 15);
    return _mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_set1_epi32(0x4000)));
  }
  static F scale_f16(const uint16_t* p) { return _mm512_cvtph_ps(halves(p)); }
  static F scale_e8m0(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes(p)), 23));
  }

  static F bump(F v) { return number(add(bits(v), set(0x8000))); }
  static F bump_even(F v) {
    const __mmask16 odd =
        _mm512_test_epi32_mask(_mm512_castps_si512(v), _mm512_set1_epi32(0x10000));
    const __m512i down = add(bits(v), set(0x7fff));
    return _mm512_castsi512_ps(
        _mm512_mask_add_epi32(down, odd, _mm512_castps_si512(v), _mm512_set1_epi32(0x8000)));
  }
  static void store_pairs(uint16_t* p, F even, F odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    // low | (odd & high_half)
    _mm512_storeu_si512(
        p, _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), high_half(), 0xf8));
  }
  [[gnu::always_inline]] static void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
  }

  static I bits(F v) { return _mm512_castps_si512(v); }
  static F number(I v) { return _mm512_castsi512_ps(v); }
  static I integer(F v) { return _mm512_cvttps_epi32(v); }
  static I set(int v) { return _mm512_set1_epi32(v); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  template <int kBits>
  static I left(I v) {
    return _mm512_slli_epi32(v, kBits);
  }
  template <int kBits>
  static I right(I v) {
    return _mm512_srli_epi32(v, kBits);
  }
  static void store_words(void* p, I v) { _mm512_storeu_si512(p, v); }
  static void store_halves(void* p, I v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
  }
  static void store_bytes(void* p, I v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
  }

 private:
  static __m128i bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i halves(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m512i high_half() { return _mm512_set1_epi32(static_cast<int>(0xffff0000u)); }
};

}  // namespace
}  // namespace hetero
