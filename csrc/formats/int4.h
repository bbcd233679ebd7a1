// int4: weight = scale * code, code in [-8, 7]; asymmetric: scale * code + minimum.
//
// Symmetric scales are bf16 with five significant bits and a sign: times a code of three bits they
// are exact in bf16, so the kernels round nothing. The value of greatest magnitude becomes -8.
#pragma once

#include "formats/group.h"

namespace hetero::int4 {

extern const float kSigned[16];    // -8 to 7
extern const float kUnsigned[16];  // 0 to 15

void quantize(const Format& format, bool least_squares, PanelGroup& group);
void quantize_asymmetric(const Format& format, bool least_squares, PanelGroup& group);

}  // namespace hetero::int4
