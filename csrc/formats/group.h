// PanelGroup: one group of K of one panel, between plain floats and codes.
#pragma once

#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "formats/format.h"

namespace hetero {

constexpr int kMaxGroup = 128;

struct PanelGroup {
  int rows = 0;                                  // columns of the panel that exist
  int count = 0;                                 // values of K that exist
  float weights[kPanelColumns][kMaxGroup] = {};  // zero beyond count
  uint8_t codes[kPanelColumns][kMaxGroup] = {};
  uint32_t scales[kPanelColumns] = {};  // bits, as the panel holds them; [0] for kPanelF32
  uint32_t minima[kPanelColumns] = {};
};

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// To nearest, ties to even; |value| < 2^22.
inline float nearest_integer(float value) { return (value + 12582912.0f) - 12582912.0f; }

inline float clamp(float value, float least, float most) {
  const float raised = value < least ? least : value;
  return raised > most ? most : raised;
}

inline float largest(const float* weights, int count) {
  float most = 0.0f;
  for (int i = 0; i < count; ++i)
    most = std::fabs(weights[i]) > most ? std::fabs(weights[i]) : most;
  return most;
}

// Scale::kOdd: the bits of the scale nearest to `value` (> 0), and what they stand for.
inline uint32_t odd_bits(float value) {
  // Its values lie halfway between multiples of 2^15 in the bits of fp32.
  const uint32_t bits = bits_of(value) >> 15;
  return bits > 0xfeff ? 0xfeff : bits;
}
inline float odd_value(uint32_t bits) { return float_of(bits << 15 | 0x4000u); }

}  // namespace hetero
