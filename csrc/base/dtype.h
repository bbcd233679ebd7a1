// Scalar conversions between fp32 and bf16.
//
// `static` gives every translation unit its own copy: an inline function would be a weak symbol,
// and the linker could then pick the copy that was compiled for AVX-512 for baseline code.
#pragma once

#include <cstdint>
#include <cstring>

namespace hetero {

static inline float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest, ties to even; NaN stays a (quiet) NaN.
static inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

static inline int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

}  // namespace hetero
