// The peak of an ISA whose tile is written over Amx: 16 x 16 sums of 32 products per instruction.
#pragma once

#include "kernels/kernel.h"

namespace hetero {
namespace {

// Six chains hide the latency (52 cycles at one product per 16); tiles are zero, which costs the
// same.
double multiply_add_peak(int64_t rounds) {
  Amx::zero<0>();
  Amx::zero<1>();
  Amx::zero<2>();
  Amx::zero<3>();
  Amx::zero<4>();
  Amx::zero<5>();
  Amx::zero<6>();
  Amx::zero<7>();
  for (int64_t round = 0; round < rounds; ++round) {
    Amx::dot<0, 6, 7>();
    Amx::dot<1, 6, 7>();
    Amx::dot<2, 6, 7>();
    Amx::dot<3, 6, 7>();
    Amx::dot<4, 6, 7>();
    Amx::dot<5, 6, 7>();
  }
  return 2.0 * 6 * 16 * 16 * 32 * static_cast<double>(rounds);
}

}  // namespace
}  // namespace hetero
