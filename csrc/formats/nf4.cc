#include "formats/nf4.h"

#include "formats/search.h"

namespace hetero::nf4 {

const float kValues[16] = {-1.0f,
                           -0.6961928009986877f,
                           -0.5250730514526367f,
                           -0.39491748809814453f,
                           -0.28444138169288635f,
                           -0.18477343022823334f,
                           -0.09105003625154495f,
                           0.0f,
                           0.07958029955625534f,
                           0.16093020141124725f,
                           0.24611230194568634f,
                           0.33791524171829224f,
                           0.44070982933044434f,
                           0.5626170039176941f,
                           0.7229568362236023f,
                           1.0f};

namespace {

constexpr float kLeastScale = 1e-37f;
constexpr uint8_t kZero = 7;

float middle(int code) { return 0.5f * (kValues[code] + kValues[code + 1]); }

uint8_t encode(float value) {
  int code = 0;
  for (int step = 8; step > 0; step /= 2) code += value > middle(code + step - 1) ? step : 0;
  return static_cast<uint8_t>(code);
}

float squared_error(const float* weights, int count, float scale) {
  const float inverse = 1.0f / scale;
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float error = weights[i] - scale * kValues[encode(weights[i] * inverse)];
    sum += error * error;
  }
  return sum;
}

}  // namespace

void quantize(const Format&, bool least_squares, PanelGroup& group) {
  std::memset(group.codes, kZero, sizeof(group.codes));
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    const float most = largest(weights, group.count);
    if (most < kLeastScale) continue;
    uint16_t best = float_to_bf16(most);
    float least_error = INFINITY;
    for (int i = 0; least_squares && i < kNumFactors; ++i) {
      const uint16_t bits = float_to_bf16(most * factor(i));
      const float error = squared_error(weights, group.count, bf16_to_float(bits));
      if (error < least_error) least_error = error, best = bits;
    }
    group.scales[row] = best;
    const float inverse = 1.0f / bf16_to_float(best);
    for (int i = 0; i < group.count; ++i) group.codes[row][i] = encode(weights[i] * inverse);
  }
}

}  // namespace hetero::nf4
