// mxfp4: e2m1 codes, a power of two for 32 of them (OCP Microscaling Formats, version 1.0).
//
// scale * code is exact in bf16. The smallest scale, 2^-127, counts as zero, as denormals do.
#pragma once

#include "formats/group.h"

namespace hetero::mxfp4 {

extern const float kValues[16];

void quantize(const Format& format, bool least_squares, PanelGroup& group);

}  // namespace hetero::mxfp4
