// Bytes of AVX2, and the contract of every Bytes, which kernels/digits.inl.h is written over. A
// lane is a column: a word of 32 bits, four bytes of which belong to four values of K.
//   kTogether: the most rows that are multiplied at once
//   kSteps<plain>: how many words of eight codes may be summed by dot
//   make_row(values, digits, to): 32 values of a row, for codes of four bits; make_wide_row: of
//   eight load(p) even(w), odd(w): the digits of the even and of the odd codes of a word, as bytes
//   pick(table, digits): what a table of 16 bytes has for them
//   dot(part, digits, x): adds the products with the four signed bytes at x
//   whole(high, low): 128 high + low, 32 bits; add(a, b)
//   left_digits(w), right_digits(w), dot_wide, whole_wide: for four codes of eight bits, in
//   whatever two parts the instructions allow
//   number(w, shift): w - shift as a float
#pragma once

#include "kernels/whole_rows.h"

namespace hetero {
namespace {

struct Bytes {
  using I = __m256i;
  using Row = RowSlab;
  static constexpr int kTogether = 4;
  // 16 bits hold 8 sums of two products of digits up to 15, or 5 of digits up to 24, with 128.
  template <bool kPlain>
  static constexpr int kSteps = kPlain ? 4 : 2;

  static void make_row(const uint16_t* values, const Digits& digits, Row* to) {
    make_whole<Arrangement::kHalves>(values, digits, to);
  }
  static void make_wide_row(const uint16_t* values, const Digits& digits, Row* to) {
    make_whole<Arrangement::kWords>(values, digits, to);
  }
  static I table(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I zero() { return _mm256_setzero_si256(); }
  static I even(I v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static I odd(I v) { return even(_mm256_srli_epi32(v, 4)); }
  static I pick(I table, I digits) { return _mm256_shuffle_epi8(table, digits); }
  static I four(const int8_t* x) {
    int bytes;
    memcpy(&bytes, x, sizeof(bytes));
    return _mm256_set1_epi32(bytes);
  }
  static I dot(I part, I digits, const int8_t* x) {
    part = _mm256_add_epi16(part, _mm256_maddubs_epi16(digits, four(x)));
    // Else GCC sums in another order, with more numbers than registers.
    __asm__("" : "+x"(part));
    return part;
  }
  static I whole(I high, I low) {
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(128)),
                            _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  }
  // 16 bits for a digit: those of the even values of K, then of the odd ones.
  static I left_digits(I v) { return _mm256_and_si256(v, _mm256_set1_epi16(255)); }
  static I right_digits(I v) { return _mm256_srli_epi16(v, 8); }
  static I dot_wide(I part, I digits, const int8_t* x) {
    part = _mm256_add_epi32(part, _mm256_madd_epi16(digits, four(x)));
    __asm__("" : "+x"(part));
    return part;
  }
  static I whole_wide(I left, I right) { return add(left, right); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static __m256 number(I w, int shift) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(w, _mm256_set1_epi32(shift)));
  }
};

}  // namespace
}  // namespace hetero
