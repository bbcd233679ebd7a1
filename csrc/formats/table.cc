#include "formats/table.h"

#include "base/check.h"

namespace hetero {
namespace {

// Values of four-bit codes.
const float kSigned[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
const float kUnsigned[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// e2m1 (OCP Microscaling Formats, version 1.0).
const float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
const Digits kByteDigits = {{}, true, 128, 1.0f};
const Digits kSignedDigits = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, true, 8, 1.0f};
const Digits kUnsignedDigits = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, true, 0, 1.0f};
const Digits kE2m1Digits = {
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}, false, 12, 0.5f};
// Quantiles of the normal distribution (Dettmers et al., 2023).
const float kNf4[16] = {-1.0f,
                        -0.6961928009986877f,
                        -0.5250730514526367f,
                        -0.39491748809814453f,
                        -0.28444138169288635f,
                        -0.18477343022823334f,
                        -0.09105003625154495f,
                        0.0f,
                        0.07958029955625534f,
                        0.16093020141124725f,
                        0.24611230194568634f,
                        0.33791524171829224f,
                        0.44070982933044434f,
                        0.5626170039176941f,
                        0.7229568362236023f,
                        1.0f};

// int8: with the ten odd bits of a Scale::kOdd, scale * code never lies halfway between two bf16,
// which spares the test for ties. int4: scales have five significant bits and a sign; times a code
// of three bits they are exact in bf16. The "minimum" of the asymmetric forms is the middle of the
// range: it is small, and so loses little in bf16. fp8: checkpoints have a scale for 128 by 128
// weights, which four panels then share; quantising gives every panel its own. mxfp4: products are
// exact; the smallest scale, 2^-127, counts as zero, as denormals do.
const Format kFormats[] = {
    // name, code, scale, has_min, rounding, group, table, digits, scheme
    {"int8", Code::kInt8, Scale::kOdd, false, Rounding::kNoTies, 32, nullptr, &kByteDigits,
     Scheme::kSymmetric8},
    {"int8_asym", Code::kInt8, Scale::kBf16, true, Rounding::kEven, 32, nullptr, &kByteDigits,
     Scheme::kRange8},
    {"int4", Code::kTable4, Scale::kBf16, false, Rounding::kExact, 32, kSigned, &kSignedDigits,
     Scheme::kSymmetric4},
    {"int4_asym", Code::kTable4, Scale::kBf16, true, Rounding::kEven, 32, kSigned, &kSignedDigits,
     Scheme::kRange4},
    {"fp8", Code::kFp8, Scale::kPanelF32, false, Rounding::kEven, 128, nullptr, nullptr,
     Scheme::kFp8},
    {"mxfp4", Code::kTable4, Scale::kE8m0, false, Rounding::kExact, 32, kE2m1, &kE2m1Digits,
     Scheme::kMxfp4},
    {"nf4", Code::kTable4, Scale::kBf16, false, Rounding::kEven, 64, kNf4, nullptr, Scheme::kTable},
    // Of GGUF files: their codes and their half-precision scales as they are.
    {"q8_0", Code::kInt8, Scale::kF16, false, Rounding::kEven, 32, nullptr, &kByteDigits,
     Scheme::kNone},
    {"q4_0", Code::kTable4, Scale::kF16, false, Rounding::kEven, 32, kSigned, &kSignedDigits,
     Scheme::kNone},
    {"q4_1", Code::kTable4, Scale::kF16, true, Rounding::kEven, 32, kUnsigned, &kUnsignedDigits,
     Scheme::kNone},
    {"q4_k", {}, {}, true, {}, 32, nullptr, nullptr, Scheme::kNone, KQuant::kQ4},
    {"q5_k", {}, {}, true, {}, 32, nullptr, nullptr, Scheme::kNone, KQuant::kQ5},
    {"q6_k", {}, {}, false, {}, 16, nullptr, nullptr, Scheme::kNone, KQuant::kQ6},
};

}  // namespace

std::span<const Format> formats() { return kFormats; }

Format format_named(const std::string& name, int group) {
  for (const Format& row : kFormats) {
    if (name != row.name) continue;
    Format format = row;
    if (group != 0) format.group = group;
    HETERO_CHECK(format.group == row.group ||
                     (format.group % kPanelColumns == 0 && format.group <= kMaxGroup),
                 "group size ", group, " of ", name, "; expected a multiple of 32 up to ",
                 kMaxGroup);
    return format;
  }
  fail("unknown format ", name);
}

}  // namespace hetero
