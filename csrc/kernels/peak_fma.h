// The peak of an ISA whose tile is written in fused multiply-adds of Vec.
#pragma once

#include "kernels/kernel.h"

namespace hetero {
namespace {

// Twelve chains: enough for two units of five cycles of latency, few enough for 16 registers.
double multiply_add_peak(int64_t rounds) {
  // One lane stands for code that the compiler turns into four lanes of its own accord.
  constexpr int kWidth = Vec::kLanes == 1 ? 4 : 1, kChains = 12 * kWidth;
  // Sums stay near 1: neither denormal nor infinite, whatever the number of rounds.
  const Vec::F shrink = Vec::set1(0.5f), grow = Vec::set1(0.5f);
  Vec::F sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Vec::set1(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 48
    for (int i = 0; i < kChains; ++i) sums[i] = Vec::fma(sums[i], shrink, grow);
  }
  volatile float result = 0.0f;
  for (int i = 0; i < kChains; ++i) result = result + Vec::sum(sums[i]);
  return 2.0 * kChains * Vec::kLanes * static_cast<double>(rounds);
}

}  // namespace
}  // namespace hetero
