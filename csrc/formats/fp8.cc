#include "formats/fp8.h"

namespace hetero::fp8 {
namespace {

constexpr float kMost = 448.0f;

// The nearest e4m3, ties to even.
uint8_t encode(float value) {
  const float magnitude = std::fabs(value) > kMost ? kMost : std::fabs(value);
  const auto sign = static_cast<uint8_t>(bits_of(value) >> 31 << 7);
  if (magnitude < 0x1p-6f) {  // multiples of 2^-9
    return sign | static_cast<uint8_t>(static_cast<int>(nearest_integer(magnitude * 512.0f)));
  }
  const uint32_t bits = bits_of(magnitude);
  const uint32_t rounded = (bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20;
  return sign | static_cast<uint8_t>(rounded - (120u << 3));
}

}  // namespace

void quantize(const Format&, bool, PanelGroup& group) {
  float most = 0.0f;
  for (int row = 0; row < group.rows; ++row) {
    const float own = largest(group.weights[row], group.count);
    most = own > most ? own : most;
  }
  const float scale = most / kMost;
  // The kernels multiply the scale by 256 and the smallest codes by it.
  if (scale < 1e-35f) return;
  group.scales[0] = bits_of(scale);
  const float inverse = 1.0f / scale;
  for (int row = 0; row < group.rows; ++row) {
    for (int i = 0; i < group.count; ++i) {
      group.codes[row][i] = encode(group.weights[row][i] * inverse);
    }
  }
}

}  // namespace hetero::fp8
