// Packing of codes that exist. The kernels quantise: kernels/quantize.inl.h.
#pragma once

#include "formats/format.h"

namespace hetero {

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
