#include "formats/int8.h"

#include "formats/search.h"

namespace hetero::int8 {
namespace {

void encode(const float* weights, int count, float scale, float offset, float least,
            uint8_t* codes) {
  const float inverse = 1.0f / scale;
  for (int i = 0; i < count; ++i) {
    const float q = clamp(nearest_integer((weights[i] - offset) * inverse), least, 127.0f);
    codes[i] = static_cast<uint8_t>(static_cast<int>(q));
  }
}

// Under this a reciprocal overflows; such groups are zero.
constexpr float kLeastScale = 1e-37f;

}  // namespace

void quantize(const Format&, bool least_squares, PanelGroup& group) {
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    const float base = largest(weights, group.count) / 127.0f;
    if (base < kLeastScale) continue;
    uint32_t best = odd_bits(base);
    float least_error = INFINITY;
    for (int i = 0; least_squares && i < kNumFactors; ++i) {
      const uint32_t bits = odd_bits(base * factor(i));
      const float error =
          squared_error(weights, group.count, odd_value(bits), 0.0f, -127.0f, 127.0f);
      if (error < least_error) least_error = error, best = bits;
    }
    group.scales[row] = best;
    encode(weights, group.count, odd_value(best), 0.0f, -127.0f, group.codes[row]);
  }
}

void quantize_asymmetric(const Format&, bool least_squares, PanelGroup& group) {
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    float low = weights[0], high = weights[0];
    for (int i = 1; i < group.count; ++i) {
      low = weights[i] < low ? weights[i] : low;
      high = weights[i] > high ? weights[i] : high;
    }
    // Codes -128 to 127 around a middle that is half a step above the mean of the ends.
    const float base = high / 255.0f - low / 255.0f;
    float least_error = INFINITY;
    for (int i = 0; i < (least_squares ? kNumFactors : 1); ++i) {
      const uint16_t scale_bits = float_to_bf16(base * factor(i));
      const float scale = bf16_to_float(scale_bits);
      const uint16_t middle_bits = float_to_bf16(0.5f * low + 0.5f * high + 0.5f * scale);
      const float middle = bf16_to_float(middle_bits);
      if (scale < kLeastScale) {  // one value: the middle alone
        group.minima[row] = float_to_bf16(0.5f * low + 0.5f * high);
        break;
      }
      const float error = squared_error(weights, group.count, scale, middle, -128.0f, 127.0f);
      if (i > 0 && !(error < least_error)) continue;
      least_error = error;
      group.scales[row] = scale_bits;
      group.minima[row] = middle_bits;
    }
    if (group.scales[row] == 0) continue;
    encode(weights, group.count, bf16_to_float(static_cast<uint16_t>(group.scales[row])),
           bf16_to_float(static_cast<uint16_t>(group.minima[row])), -128.0f, group.codes[row]);
  }
}

}  // namespace hetero::int8
