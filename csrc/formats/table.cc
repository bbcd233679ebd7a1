#include "formats/table.h"

#include "base/check.h"
#include "formats/fp8.h"
#include "formats/group.h"
#include "formats/int4.h"
#include "formats/int8.h"
#include "formats/mxfp4.h"
#include "formats/nf4.h"

namespace hetero {
namespace {

const Format kFormats[] = {
    // name, code, scale, has_min, rounding, group, table, quantize
    {"int8", Code::kInt8, Scale::kOdd, false, Rounding::kNoTies, 32, nullptr, &int8::quantize},
    {"int8_asym", Code::kInt8, Scale::kBf16, true, Rounding::kEven, 32, nullptr,
     &int8::quantize_asymmetric},
    {"int4", Code::kTable4, Scale::kBf16, false, Rounding::kExact, 32, int4::kSigned,
     &int4::quantize},
    {"int4_asym", Code::kTable4, Scale::kBf16, true, Rounding::kEven, 32, int4::kSigned,
     &int4::quantize_asymmetric},
    {"fp8", Code::kFp8, Scale::kPanelF32, false, Rounding::kEven, 128, nullptr, &fp8::quantize},
    {"mxfp4", Code::kTable4, Scale::kE8m0, false, Rounding::kExact, 32, mxfp4::kValues,
     &mxfp4::quantize},
    {"nf4", Code::kTable4, Scale::kBf16, false, Rounding::kEven, 64, nf4::kValues, &nf4::quantize},
    // Of GGUF files: their codes and their half-precision scales as they are.
    {"q8_0", Code::kInt8, Scale::kF16, false, Rounding::kEven, 32, nullptr, nullptr},
    {"q4_0", Code::kTable4, Scale::kF16, false, Rounding::kEven, 32, int4::kSigned, nullptr},
    {"q4_1", Code::kTable4, Scale::kF16, true, Rounding::kEven, 32, int4::kUnsigned, nullptr},
};

}  // namespace

std::span<const Format> formats() { return kFormats; }

Format format_named(const std::string& name, int group) {
  for (const Format& row : kFormats) {
    if (name != row.name) continue;
    Format format = row;
    if (group != 0) format.group = group;
    HETERO_CHECK(format.group % kPanelColumns == 0 && format.group <= kMaxGroup, "group size ",
                 group, " of ", name, "; expected a multiple of 32 up to ", kMaxGroup);
    return format;
  }
  fail("unknown format ", name);
}

}  // namespace hetero
