// The peak of an ISA whose tile is written over Bf16Dot: two products per lane and instruction.
#pragma once

#include "kernels/kernel.h"

namespace hetero {
namespace {

double multiply_add_peak(int64_t rounds) {
  constexpr int kChains = 12, kLanes = 16;
  const uint32_t small = 0x3a803a80u;  // two bf16 of 2^-10
  const Bf16Dot::Pairs a = Bf16Dot::broadcast(&small), b = Bf16Dot::broadcast(&small);
  Bf16Dot::Sum sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Bf16Dot::zero();
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = Bf16Dot::dot(sums[i], a, b);
  }
  float lanes[kLanes];
  volatile float result = 0.0f;
  for (int i = 0; i < kChains; ++i) {
    Bf16Dot::store(lanes, sums[i]);
    result = result + lanes[0];
  }
  return 2.0 * 2.0 * kChains * kLanes * static_cast<double>(rounds);
}

}  // namespace
}  // namespace hetero
