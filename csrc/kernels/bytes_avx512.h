// Bytes of AVX-512 BW, and of VNNI where the flags allow it: the same numbers in half the
// instructions. The contract is in bytes_avx2.h.
#pragma once

#include "kernels/whole_rows.h"

namespace hetero {
namespace {

struct Bytes {
  using I = __m512i;
  using Row = RowSlab;
  static constexpr int kTogether = 12;

  static void make_row(const uint16_t* values, const Digits& digits, Row* to) {
    make_whole<Arrangement::kHalves>(values, digits, to);
  }
  static I table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static I load(const void* p) { return _mm512_loadu_si512(p); }
  static I zero() { return _mm512_setzero_si512(); }
  static I even(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static I odd(I v) { return even(_mm512_srli_epi32(v, 4)); }
  static I pick(I table, I digits) { return _mm512_shuffle_epi8(table, digits); }
  static I four(const int8_t* x) {
    int bytes;
    memcpy(&bytes, x, sizeof(bytes));
    return _mm512_set1_epi32(bytes);
  }
#ifdef __AVX512VNNI__
  template <bool kPlain>
  static constexpr int kSteps = 4;
  // GCC would broadcast in an instruction of its own.
  static I dot(I part, I digits, const int8_t* x) {
    using Four [[gnu::may_alias]] = int;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(part)
            : "v"(digits), "m"(*reinterpret_cast<const Four*>(x)));
    return part;
  }
  static I whole(I high, I low) { return add(_mm512_slli_epi32(high, 7), low); }
  // The digits as they are, with the high parts of the row and then with the low ones.
  static void make_wide_row(const uint16_t* values, const Digits& digits, Row* to) {
    make_whole<Arrangement::kBytes>(values, digits, to);
  }
  static I left_digits(I v) { return v; }
  static I right_digits(I v) { return v; }
  static I dot_wide(I part, I digits, const int8_t* x) { return dot(part, digits, x); }
  static I whole_wide(I high, I low) { return whole(high, low); }
#else
  template <bool kPlain>
  static constexpr int kSteps = kPlain ? 4 : 2;
  static I dot(I part, I digits, const int8_t* x) {
    part = _mm512_add_epi16(part, _mm512_maddubs_epi16(digits, four(x)));
    __asm__("" : "+v"(part));  // see bytes_avx2.h
    return part;
  }
  static I whole(I high, I low) {
    return add(_mm512_madd_epi16(high, _mm512_set1_epi16(128)),
               _mm512_madd_epi16(low, _mm512_set1_epi16(1)));
  }
  static void make_wide_row(const uint16_t* values, const Digits& digits, Row* to) {
    make_whole<Arrangement::kWords>(values, digits, to);
  }
  static I left_digits(I v) { return _mm512_and_si512(v, _mm512_set1_epi16(255)); }
  static I right_digits(I v) { return _mm512_srli_epi16(v, 8); }
  static I dot_wide(I part, I digits, const int8_t* x) {
    part = _mm512_add_epi32(part, _mm512_madd_epi16(digits, four(x)));
    __asm__("" : "+v"(part));
    return part;
  }
  static I whole_wide(I left, I right) { return add(left, right); }
#endif
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static __m512 number(I w, int shift) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(w, _mm512_set1_epi32(shift)));
  }
};

}  // namespace
}  // namespace hetero
