#include "formats/kquant.h"

#include <algorithm>
#include <cstring>

#include "formats/pack.h"

namespace hetero {
namespace {

// The codes of one row for one slab, at its column.
void put_codes(const KLayout& layout, const uint8_t* codes, int column, std::byte* slab) {
  uint32_t low[4] = {}, high[2] = {};
  const int bits = static_cast<int>(layout.high / 128);
  for (int i = 0; i < 32; ++i) {
    low[i / 8] |= (codes[i] & 15u) << (i % 8 * 4);
    if (bits > 0) high[i * bits / 32] |= static_cast<uint32_t>(codes[i] >> 4) << (i * bits % 32);
  }
  const auto put = [&](const uint32_t* words, int count, std::byte* to) {
    for (int i = 0; i < count; ++i) {
      std::memcpy(to + (i * kPanelColumns + column) * sizeof(uint32_t), words + i,
                  sizeof(uint32_t));
    }
  };
  put(low, 4, slab);
  put(high, bits, slab + layout.low);
}

}  // namespace

void pack_kquant(KQuant kind, const CodedMatrix& matrix, int first, std::byte* panel) {
  const KLayout layout(kind);
  const int groups = matrix.k / layout.group, own = kSuper / layout.group;
  std::memset(panel, 0, kquant_bytes(kind, matrix.k));
  for (int column = 0; column < std::min(kPanelColumns, matrix.n - first); ++column) {
    const int64_t row = first + column;
    std::byte* block = panel;
    for (int k0 = 0; k0 < matrix.k; k0 += kSuper, block += layout.end) {
      for (int slab = 0; slab < kSuper / 32; ++slab) {
        put_codes(layout, matrix.codes + row * matrix.k + k0 + slab * 32, column,
                  block + slab * (layout.low + layout.high));
      }
      const auto put = [&](const uint32_t* bits, int place) {
        bits += row * groups + k0 / layout.group;
        for (int group = 0; group < own; ++group) {
          block[layout.scales + group * layout.group_bytes + place * kPanelColumns + column] =
              static_cast<std::byte>(bits[group] & 255u);
        }
        const auto super = static_cast<uint16_t>(bits[0] >> 16);
        std::memcpy(block + layout.supers + (place * kPanelColumns + column) * sizeof(super),
                    &super, sizeof(super));
      };
      put(matrix.scales, 0);
      if (layout.has_min) put(matrix.minima, 1);
    }
  }
}

}  // namespace hetero
