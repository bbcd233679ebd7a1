// nf4: weight = scale * one of sixteen quantiles of the normal distribution (Dettmers et al.,
// 2023).
#pragma once

#include "formats/group.h"

namespace hetero::nf4 {

extern const float kValues[16];

void quantize(const Format& format, bool least_squares, PanelGroup& group);

}  // namespace hetero::nf4
