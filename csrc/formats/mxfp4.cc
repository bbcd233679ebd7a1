#include "formats/mxfp4.h"

#include <initializer_list>

namespace hetero::mxfp4 {

const float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

namespace {

// The nearest e2m1, ties to the even code; beyond 6 it is 6.
uint8_t encode(float value) {
  const float m = std::fabs(value);
  const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                   (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(code | (value < 0.0f ? 8 : 0));
}

float squared_error(const float* weights, int count, uint32_t exponent) {
  const float scale = float_of(exponent << 23), inverse = 1.0f / scale;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float error = weights[i] - scale * kValues[encode(weights[i] * inverse)];
    sum += error * error;
  }
  return sum;
}

}  // namespace

void quantize(const Format&, bool least_squares, PanelGroup& group) {
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    // The exponent of the largest weight less that of the largest code.
    const uint32_t exponent = bits_of(largest(weights, group.count)) >> 23;
    if (exponent < 4) continue;
    uint32_t best = exponent - 2;
    if (least_squares) {
      float least_error = squared_error(weights, group.count, best);
      for (const uint32_t other : {exponent - 3, exponent - 1}) {
        const float error = squared_error(weights, group.count, other);
        if (error < least_error) least_error = error, best = other;
      }
    }
    group.scales[row] = best;
    const float inverse = 1.0f / float_of(best << 23);
    for (int i = 0; i < group.count; ++i) {
      group.codes[row][i] = encode(weights[i] * inverse);
    }
  }
}

}  // namespace hetero::mxfp4
