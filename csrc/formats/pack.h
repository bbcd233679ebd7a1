// Packing of one panel in any quantised format.
#pragma once

#include "formats/format.h"

namespace hetero {

// Quantises rows first..first+31 (those beyond n are zero) of a row-major [n, k] matrix. Returns
// false, with the panel undefined, when a weight is not finite.
bool quantize_panel(const Format& format, const uint16_t* weight, int n, int k, int first,
                    bool least_squares, std::byte* panel);
bool quantize_panel(const Format& format, const float* weight, int n, int k, int first,
                    bool least_squares, std::byte* panel);

// What a checkpoint holds: codes [n, k], one per byte (four-bit codes in the low half), scales and
// minima as their bits, [n, groups] (kPanelF32: [ceil(n / scale_rows), groups], each for scale_rows
// rows); minima null where the format has none.
struct CodedMatrix {
  const uint8_t* codes = nullptr;
  const uint32_t* scales = nullptr;
  const uint32_t* minima = nullptr;
  int n = 0, k = 0;
  int scale_rows = 1;
};

// Packs rows first..first+31 of codes as they are.
void pack_codes(const Format& format, const CodedMatrix& matrix, int first, std::byte* panel);

}  // namespace hetero
