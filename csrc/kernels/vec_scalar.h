// Vec of one lane: the portable row and the oracle of the others. See vec_avx512.h for the
// contract.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels/vec_math.inl.h"

namespace hetero {
namespace {

struct VecScalar {
  using F = float;
  static constexpr int kLanes = 1;

  static F zero() { return 0.0f; }
  static F set1(float v) { return v; }
  static F load(const float* p) { return *p; }
  static F load_n(const float* p, int n) { return n > 0 ? *p : 0.0f; }
  static void store(float* p, F v) { *p = v; }
  static void store_n(float* p, F v, int n) {
    if (n > 0) *p = v;
  }
  static F load_bf16(const uint16_t* p) { return from_bits(static_cast<uint32_t>(*p) << 16); }
  static F load_bf16_n(const uint16_t* p, int n) { return n > 0 ? load_bf16(p) : 0.0f; }
  static void store_bf16(uint16_t* p, F v) {
    const uint32_t b = bits(v);
    *p = v != v ? uint16_t{0x7fc0} : static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  }
  static F round_bf16(F v) {
    uint16_t b;
    store_bf16(&b, v);
    return load_bf16(&b);
  }
  static void store_bf16_n(uint16_t* p, F v, int n) {
    if (n > 0) store_bf16(p, v);
  }

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F abs(F a) { return from_bits(bits(a) & 0x7fffffffu); }
  static F copysign(F magnitude, F sign) {
    return from_bits((bits(magnitude) & 0x7fffffffu) | (bits(sign) & 0x80000000u));
  }
  static F select_gt(F a, F b, F yes, F no) { return a > b ? yes : no; }
  static F head(F v, F fill, int n) { return n > 0 ? v : fill; }
  static F scale2(F m, F n) {
    const int e = static_cast<int>(n == n ? n : 0.0f);
    return m * from_bits(static_cast<uint32_t>(e + 127) << 23);
  }
  static float sum(F v) { return v; }
  static float hmax(F v) { return v; }
  static F exp(F x) { return exp_of<VecScalar>(x); }

 private:
  static uint32_t bits(float v) {
    uint32_t b;
    memcpy(&b, &v, 4);
    return b;
  }
  static float from_bits(uint32_t b) {
    float v;
    memcpy(&v, &b, 4);
    return v;
  }
};

}  // namespace
}  // namespace hetero
