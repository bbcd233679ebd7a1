// Rows of the left operand as whole numbers, for products with digits (kernels/digits.inl.h).
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "formats/format.h"

namespace hetero {
namespace {

// 32 values of K of a row: x = unit * whole, whole = 128 high + low, low from 0 to 127.
struct RowSlab {
  int8_t parts[4][16];  // eight values of K each, as an Arrangement says
  float unit;           // times that of the digits
  float sum;            // of x
  int32_t shift;        // the digits' middle times the sum of the whole numbers
  int32_t unused;
};
static_assert(sizeof(RowSlab) == 80, "four parts and their numbers");

// How the whole numbers of eight values of K lie in 16 bytes, so that every four bytes are what one
// instruction multiplies with the digits of a column.
enum class Arrangement {
  kHalves,  // high of the even values and of the odd ones, then low likewise
  kBytes,   // high in order, then low
  kWords,   // 16 bits: those of the even values, then of the odd ones
};

// `evens` and `odds`: of two times eight values of K, 32 bits each.
template <Arrangement kArrangement>
inline __m256i arranged(__m256i evens, __m256i odds) {
  const __m256i low = _mm256_set1_epi32(127);
  if (kArrangement == Arrangement::kHalves) {
    const __m256i highs =
        _mm256_packs_epi32(_mm256_srai_epi32(evens, 7), _mm256_srai_epi32(odds, 7));
    const __m256i lows =
        _mm256_packs_epi32(_mm256_and_si256(evens, low), _mm256_and_si256(odds, low));
    return _mm256_packs_epi16(highs, lows);
  }
  if (kArrangement == Arrangement::kWords) return _mm256_packs_epi32(evens, odds);
  const __m256i words = _mm256_blend_epi16(evens, _mm256_slli_epi32(odds, 16), 0xaa);
  return _mm256_packs_epi16(_mm256_srai_epi16(words, 7),
                            _mm256_and_si256(words, _mm256_set1_epi16(127)));
}

// The unit is 2^-13 of the power of two in the largest magnitude: values down to a 64th of that are
// exact, all others are rounded to nearest, by at most 2^-14 of the largest. A slab with a value
// that is not finite has the unit NaN. Units under 2^-113 are not used.
template <Arrangement kArrangement>
inline void make_whole(const uint16_t* row, const Digits& digits, RowSlab* to) {
  constexpr int kBias = 127, kMant = 23, kBits = 13, kLeast = kBias - 100;
  const __m256i bits[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)),
                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + 16))};
  const __m256i plus = _mm256_set1_epi16(0x7fff);
  const __m256i most =
      _mm256_max_epu16(_mm256_and_si256(bits[0], plus), _mm256_and_si256(bits[1], plus));
  const __m128i half =
      _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  // The instruction finds the least.
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
  const int largest = ~_mm_cvtsi128_si32(least) & 0x7fff, found = largest >> 7;
  const int exponent = found < kLeast ? kLeast : found;
  const bool finite = exponent < 255;
  const __m256 inverse =
      _mm256_castsi256_ps(_mm256_set1_epi32(finite ? (2 * kBias + kBits - exponent) << kMant : 0));
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < 2; ++i) {
    const __m256i evens = _mm256_cvtps_epi32(
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(bits[i], 16)), inverse));
    const __m256i odds = _mm256_cvtps_epi32(
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_and_si256(bits[i], odd)), inverse));
    sum = _mm256_add_epi32(sum, _mm256_add_epi32(evens, odds));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to->parts[2 * i]),
                        arranged<kArrangement>(evens, odds));
  }
  __m128i total = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0x4e));
  total = _mm_add_epi32(total, _mm_shuffle_epi32(total, 0xb1));
  const int whole = finite ? _mm_cvtsi128_si32(total) : 0;  // NaN converts to the least integer
  const int unit_bits = finite ? (exponent - kBits) << kMant : 0x7fc00000;
  float unit;
  memcpy(&unit, &unit_bits, sizeof(unit));
  to->unit = unit * digits.unit;
  to->sum = unit * static_cast<float>(whole);
  to->shift = digits.middle * whole;
  to->unused = 0;
}

}  // namespace
}  // namespace hetero
