// fp8: e4m3 codes; one fp32 scale for 128 values of K of all columns of a panel.
//
// Checkpoints have a scale for 128 by 128 weights, which four panels then share; quantising from
// bf16 gives every panel its own.
#pragma once

#include "formats/group.h"

namespace hetero::fp8 {

void quantize(const Format& format, bool least_squares, PanelGroup& group);

}  // namespace hetero::fp8
