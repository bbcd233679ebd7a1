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

void encode_range(const float* weights, int count, float scale, float offset, uint8_t* codes) {
  encode(weights, count, scale, offset, -128.0f, codes);
}

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
  quantize_range(least_squares, -128.0f, 127.0f, encode_range, group);
}

}  // namespace hetero::int8
