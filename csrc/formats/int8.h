// int8: weight = scale * code, code in [-127, 127]; asymmetric: scale * code + minimum, code in
// [-128, 127].
//
// Symmetric scales are Scale::kOdd: with ten odd bits, scale * code never lies halfway between two
// bf16, which spares the kernels the test for ties. The "minimum" of the asymmetric form is the
// middle of the range: it is small, and so loses little in bf16.
#pragma once

#include "formats/group.h"

namespace hetero::int8 {

void quantize(const Format& format, bool least_squares, PanelGroup& group);
void quantize_asymmetric(const Format& format, bool least_squares, PanelGroup& group);

}  // namespace hetero::int8
