// Choosing a scale by squared error: the candidates of every format that has a range to shrink.
#pragma once

#include "formats/group.h"

namespace hetero {

// Sum of squared errors of scale * q + offset, q an integer in [least, most].
inline float squared_error(const float* weights, int count, float scale, float offset, float least,
                           float most) {
  const float inverse = 1.0f / scale;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float q = clamp(nearest_integer((weights[i] - offset) * inverse), least, most);
    const float error = weights[i] - (scale * q + offset);
    sum += error * error;
  }
  return sum;
}

// Factors of the scale that the maximum would give, from 1.0 down.
constexpr int kNumFactors = 24;
inline float factor(int i) { return 1.0f - 0.02f * static_cast<float>(i); }

// Under this a reciprocal overflows; such groups are zero.
constexpr float kLeastScale = 1e-37f;

// Integers from `least` to `most` between the ends of every row's group: writes bf16 scales, bf16
// middles (half a step above the mean of the ends) and, with `encode`, the codes. A group of one
// value is its middle alone.
template <class Encode>
inline void quantize_range(bool least_squares, float least, float most, Encode encode,
                           PanelGroup& group) {
  const float steps = most - least;
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    float low = weights[0], high = weights[0];
    for (int i = 1; i < group.count; ++i) {
      low = weights[i] < low ? weights[i] : low;
      high = weights[i] > high ? weights[i] : high;
    }
    const float base = high / steps - low / steps;
    float least_error = INFINITY;
    for (int i = 0; i < (least_squares ? kNumFactors : 1); ++i) {
      const uint16_t scale_bits = float_to_bf16(base * factor(i));
      const float scale = bf16_to_float(scale_bits);
      const uint16_t middle_bits = float_to_bf16(0.5f * low + 0.5f * high + 0.5f * scale);
      if (scale < kLeastScale) {
        group.minima[row] = float_to_bf16(0.5f * low + 0.5f * high);
        break;
      }
      const float error =
          squared_error(weights, group.count, scale, bf16_to_float(middle_bits), least, most);
      if (i > 0 && !(error < least_error)) continue;
      least_error = error;
      group.scales[row] = scale_bits;
      group.minima[row] = middle_bits;
    }
    if (group.scales[row] == 0) continue;
    encode(weights, group.count, bf16_to_float(static_cast<uint16_t>(group.scales[row])),
           bf16_to_float(static_cast<uint16_t>(group.minima[row])), group.codes[row]);
  }
}

}  // namespace hetero
