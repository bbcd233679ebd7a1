#include "formats/pack.h"

#include <algorithm>
#include <memory>

#include "base/dtype.h"

namespace hetero {
namespace {

// One group of K of one panel.
struct PanelGroup {
  uint8_t codes[kPanelColumns][kMaxGroup] = {};
  uint32_t scales[kPanelColumns] = {};  // bits, as the panel holds them; [0] for kPanelF32
  uint32_t minima[kPanelColumns] = {};
};

// The code that stands for zero, for padding: with a scale of zero any would do.
uint8_t zero_code(const Format& format) {
  if (format.code != Code::kTable4) return 0;
  for (uint8_t i = 0; i < 16; ++i) {
    if (format.table[i] == 0.0f) return i;
  }
  return 0;
}

void put_scales(const Format& format, const uint32_t* bits, std::byte* to) {
  if (format.scale == Scale::kPanelF32) {
    std::memcpy(to, bits, sizeof(float));
    return;
  }
  for (int row = 0; row < kPanelColumns; ++row) {
    const auto half = static_cast<uint16_t>(bits[row]);
    if (format.scale == Scale::kE8m0) {
      to[row] = static_cast<std::byte>(half);
    } else {
      std::memcpy(to + 2 * row, &half, sizeof(half));
    }
  }
}

// As many codes of a row as a word of the panel holds.
uint32_t word_of(Code code, const uint8_t* codes) {
  if (code == Code::kInt8) {
    uint32_t four;
    std::memcpy(&four, codes, sizeof(four));
    return four ^ 0x80808080u;  // plus 128
  }
  uint64_t eight;
  std::memcpy(&eight, codes, sizeof(eight));
  // Eight bytes of four bits each into 32 bits.
  eight = (eight | eight >> 4) & 0x00ff00ff00ff00ffu;
  eight = (eight | eight >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(eight | eight >> 16);
}

void put_codes(const Format& format, const PanelGroup& group, int end, std::byte* slab) {
  if (format.code == Code::kFp8) {
    auto* bytes = reinterpret_cast<uint8_t*>(slab);
    for (int k = 0; k < end; ++k) {
      for (int row = 0; row < kPanelColumns; ++row) *bytes++ = group.codes[row][k];
    }
    return;
  }
  auto* words = reinterpret_cast<uint32_t*>(slab);
  for (int k = 0; k < end; k += codes_per_word(format.code)) {
    for (int row = 0; row < kPanelColumns; ++row) {
      *words++ = word_of(format.code, &group.codes[row][k]);
    }
  }
}

// Lays a group's codes and scales out in the panel, where it begins at value k0.
void put_group(const Format& format, const PanelGroup& group, int k_pad, int k0, std::byte* panel) {
  put_codes(format, group, std::min(k_pad - k0, format.group), panel + codes_at(format, k0));
  std::byte* scales = panel + scales_at(format, k_pad, k0);
  put_scales(format, group.scales, scales);
  if (format.has_min) put_scales(format, group.minima, scales + scale_bytes(format));
}

}  // namespace

void pack_codes(const Format& format, const CodedMatrix& matrix, int first, std::byte* panel) {
  if (format.kquant != KQuant::kNone) return pack_kquant(format.kquant, matrix, first, panel);
  const int k_pad = round_up(matrix.k, kPanelColumns);
  const int groups = ceil_div(matrix.k, format.group);
  clear_padding(format, k_pad, panel);
  auto group = std::make_unique<PanelGroup>();
  for (int k0 = 0; k0 < k_pad; k0 += format.group) {
    *group = PanelGroup();
    std::memset(group->codes, zero_code(format), sizeof(group->codes));
    const int count = std::min(format.group, matrix.k - k0);
    for (int row = 0; row < std::min(kPanelColumns, matrix.n - first); ++row) {
      const int64_t at = first + row;
      std::memcpy(group->codes[row], matrix.codes + at * matrix.k + k0, count);
      const int64_t scale = at / matrix.scale_rows * groups + k0 / format.group;
      group->scales[row] = matrix.scales[scale];
      if (format.has_min) group->minima[row] = matrix.minima[scale];
    }
    put_group(format, *group, k_pad, k0, panel);
  }
}

}  // namespace hetero
