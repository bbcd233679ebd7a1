#include "formats/int4.h"

#include "formats/search.h"

namespace hetero::int4 {

const float kSigned[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
const float kUnsigned[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

namespace {

constexpr uint8_t kZero = 8;
constexpr uint16_t kSigns[2] = {0, 0x8000};

// bf16 bits of the nearest scale with five significant bits.
uint16_t short_bits(float scale) {
  const uint32_t bits = bits_of(scale);
  return static_cast<uint16_t>(((bits + 0x3ffffu + ((bits >> 19) & 1u)) >> 19) << 3);
}

void encode(const float* weights, int count, float scale, float offset, uint8_t* codes) {
  const float inverse = 1.0f / scale;
  for (int i = 0; i < count; ++i) {
    const float q = clamp(nearest_integer((weights[i] - offset) * inverse), -8.0f, 7.0f);
    codes[i] = static_cast<uint8_t>(static_cast<int>(q) + 8);
  }
}

}  // namespace

void quantize(const Format&, bool least_squares, PanelGroup& group) {
  std::memset(group.codes, kZero, sizeof(group.codes));
  for (int row = 0; row < group.rows; ++row) {
    const float* weights = group.weights[row];
    float extreme = 0.0f;
    for (int i = 0; i < group.count; ++i) {
      extreme = std::fabs(weights[i]) > std::fabs(extreme) ? weights[i] : extreme;
    }
    const float base = extreme / -8.0f;
    if (std::fabs(base) < kLeastScale) continue;
    uint16_t best = short_bits(base);
    float least_error = INFINITY;
    // Scales of five bits are 3 to 6 % apart: larger ones than the maximum's, and of either sign,
    // are candidates too.
    for (int i = -8; least_squares && i < kNumFactors; ++i) {
      const uint16_t bits = short_bits(base * factor(i));
      for (const uint16_t sign : kSigns) {
        const auto signed_bits = static_cast<uint16_t>(bits ^ sign);
        const float error =
            squared_error(weights, group.count, bf16_to_float(signed_bits), 0.0f, -8.0f, 7.0f);
        if (error < least_error) least_error = error, best = signed_bits;
      }
    }
    group.scales[row] = best;
    encode(weights, group.count, bf16_to_float(best), 0.0f, group.codes[row]);
  }
}

void quantize_asymmetric(const Format&, bool least_squares, PanelGroup& group) {
  std::memset(group.codes, kZero, sizeof(group.codes));
  quantize_range(least_squares, -8.0f, 7.0f, encode, group);
}

}  // namespace hetero::int4
