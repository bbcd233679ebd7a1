// Format: how the panels of a quantised weight lie in memory and what their codes mean.
//
// A panel is 32 columns (rows of the weight) by k_pad values, in runs of groups of K: the slabs of
// a run, 32 values of K each, then the scales of its groups. A run has as many groups as their
// scales need to fill a cache line, so that a panel is read from its first byte to its last.
//   int8 slab: [8][32 columns] words of 32 bits, the first of four values of K in the lowest byte
//   fp8 slab: [32][32 columns] bytes
//   4-bit slab: [4][32 columns] words of 32 bits, the first of eight values of K in the lowest bits
//   scales of a group: [32 columns], followed by its minima where the format has them
//
// weight = scale * code or scale * code + minimum. Kernels that multiply bf16 round it to bf16, to
// nearest, ties to even; so does everything that runs backward. Forward, kernels that multiply fp32
// do not round it: see kernels/slabs.inl.h.
//
// No STL: the kernels of every instruction set include this file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "formats/kquant.h"

namespace hetero {

enum class Code : int {
  kInt8,    // a byte: the number plus 128
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

// How bf16 or fp32 weights become scales and codes: kernels/choose.inl.h.
enum class Scheme : int {
  kNone,        // codes come from a checkpoint only
  kSymmetric8,  // scale * code, -127 to 127
  kRange8,      // scale * code + middle, -128 to 127
  kSymmetric4,  // scale * code, -8 to 7
  kRange4,      // scale * code + middle, -8 to 7
  kFp8,
  kMxfp4,
  kTable,  // the nearest entry of an ascending table
};

// Codes that stand for whole numbers: value = unit * (digit - middle).
struct Digits {
  uint8_t digit[16];  // of every code of four bits; at most 31
  bool plain;         // a code is its own digit; otherwise scales are Scale::kE8m0, without minima
  int middle;
  float unit;
};

struct Format {
  const char* name = "";
  Code code = Code::kInt8;
  Scale scale = Scale::kBf16;
  bool has_min = false;
  Rounding rounding = Rounding::kEven;
  int group = 32;                  // values of K that share a scale: a multiple of 32
  const float* table = nullptr;    // of kTable4: 16 values
  const Digits* digits = nullptr;  // null where codes are no such numbers
  Scheme scheme = Scheme::kNone;
  // Not kNone: the panel is laid out by formats/kquant.h, which then says what is not said here.
  KQuant kquant = KQuant::kNone;
};

constexpr int kPanelColumns = 32;
constexpr int kMaxGroup = 128;

// Of codes that lie in words.
constexpr int codes_per_word(Code code) { return code == Code::kInt8 ? 4 : 8; }

static inline size_t slab_bytes(const Format& format) {
  return format.code == Code::kTable4 ? 512 : 1024;
}

// Bytes of the scales (or of the minima) of one group of a panel.
static inline size_t scale_bytes(const Format& format) {
  if (format.scale == Scale::kPanelF32) return 4;
  return format.scale == Scale::kE8m0 ? kPanelColumns : 2 * kPanelColumns;
}

// Bytes of the scales and minima of one group.
static inline size_t group_bytes(const Format& format) {
  return scale_bytes(format) * (format.has_min ? 2 : 1);
}

// Values of K in a whole run, and the bytes of its scales.
static inline int run_values(const Format& format) {
  const size_t own = group_bytes(format);
  return own < 64 ? format.group * static_cast<int>(64 / own) : format.group;
}
static inline size_t run_scale_bytes(const Format& format) {
  return group_bytes(format) < 64 ? 64 : group_bytes(format);
}

static inline size_t run_bytes(const Format& format, int values) {
  return slab_bytes(format) * (values / kPanelColumns) + run_scale_bytes(format);
}

static inline size_t panel_bytes(const Format& format, int k_pad) {
  if (format.kquant != KQuant::kNone) return kquant_bytes(format.kquant, k_pad);
  const int whole = run_values(format), rest = k_pad % whole;
  return run_bytes(format, whole) * (k_pad / whole) + (rest > 0 ? run_bytes(format, rest) : 0);
}

// Where the slab that begins at value k lies in a panel.
static inline size_t codes_at(const Format& format, int k) {
  const int whole = run_values(format);
  return run_bytes(format, whole) * (k / whole) + slab_bytes(format) * (k % whole / kPanelColumns);
}

// Where the scales of the group that holds value k begin; its minima follow them.
static inline size_t scales_at(const Format& format, int k_pad, int k) {
  const int whole = run_values(format), first = k / whole * whole;
  const int values = k_pad - first < whole ? k_pad - first : whole;
  return codes_at(format, first) + slab_bytes(format) * (values / kPanelColumns) +
         group_bytes(format) * ((k - first) / format.group);
}

// Zeros where the scales of a panel may end before their cache line does.
static inline void clear_padding(const Format& format, int k_pad, std::byte* panel) {
  const size_t scales = run_scale_bytes(format);
  std::memset(panel + panel_bytes(format, k_pad) - scales, 0, scales);
}

}  // namespace hetero
