// How the bf16 dot-product instructions read and write numbers: denormals count as zero.
#pragma once

#include "base/dtype.h"

namespace hetero {
namespace {

inline float flush(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// The bf16 in the low and high half of a pair.
inline float even_of(uint32_t pair) { return flush(bf16_to_float(static_cast<uint16_t>(pair))); }
inline float odd_of(uint32_t pair) {
  return flush(bf16_to_float(static_cast<uint16_t>(pair >> 16)));
}

}  // namespace
}  // namespace hetero
