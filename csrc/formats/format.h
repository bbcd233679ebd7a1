// Format: how the panels of a quantised weight lie in memory and what their codes mean.
//
// A panel is 32 columns (rows of the weight) by k_pad values: slabs of 32 values of K, one after
// the other, then the scales of every group of K, then padding to 64 bytes.
//   8-bit slab: [16 pairs][2][32 columns] bytes
//   4-bit slab: [4][32 columns] words of 32 bits, the first of eight values of K in the lowest bits
//   scales of a group: [32 columns], followed by its minima where the format has them
// weight = round_to_bf16(scale * code) or round_to_bf16(scale * code + minimum), to nearest, ties
// to even: the one value that every kernel, forward and backward, computes with.
//
// No STL: the kernels of every instruction set include this file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetero {

enum class Code : int {
  kInt8,    // signed bytes
  kFp8,     // e4m3
  kTable4,  // four bits: index into Format::table
};

enum class Scale : int {
  kBf16,
  kF16,
  kOdd,   // no sign: 8 bits of exponent, 8 of mantissa, and one more mantissa bit that is always 1
  kE8m0,  // a power of two: its biased exponent
  kPanelF32,  // one fp32 for all columns of the panel
};

// How hard it is to round scale * code to bf16.
enum class Rounding : int {
  kExact,   // it is a bf16 already
  kNoTies,  // never halfway between two
  kEven,    // anything
};

struct PanelGroup;

struct Format {
  const char* name = "";
  Code code = Code::kInt8;
  Scale scale = Scale::kBf16;
  bool has_min = false;
  Rounding rounding = Rounding::kEven;
  int group = 32;                // values of K that share a scale: a multiple of 32
  const float* table = nullptr;  // of kTable4: 16 values
  // Chooses scales and codes of a group; null: codes come from a checkpoint only.
  void (*quantize)(const Format& format, bool least_squares, PanelGroup& group) = nullptr;
};

constexpr int kPanelColumns = 32;

static inline size_t slab_bytes(const Format& format) {
  return format.code == Code::kTable4 ? 512 : 1024;
}

// Bytes of the scales (or of the minima) of one group of a panel.
static inline size_t scale_bytes(const Format& format) {
  if (format.scale == Scale::kPanelF32) return 4;
  return format.scale == Scale::kE8m0 ? kPanelColumns : 2 * kPanelColumns;
}

static inline int num_groups(const Format& format, int k_pad) {
  return (k_pad + format.group - 1) / format.group;
}

static inline size_t codes_bytes(const Format& format, int k_pad) {
  return slab_bytes(format) * (k_pad / kPanelColumns);
}

static inline size_t panel_bytes(const Format& format, int k_pad) {
  const size_t scales = scale_bytes(format) * (format.has_min ? 2 : 1) * num_groups(format, k_pad);
  return (codes_bytes(format, k_pad) + scales + 63) / 64 * 64;
}

// Where the scales of the group that holds value k begin; its minima follow them.
static inline size_t scales_at(const Format& format, int k_pad, int k) {
  return codes_bytes(format, k_pad) +
         scale_bytes(format) * (format.has_min ? 2 : 1) * (k / format.group);
}

}  // namespace hetero
