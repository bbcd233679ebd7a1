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

}  // namespace hetero
