// Which kernel sets exist, which of them this processor runs, and which one to use.
#pragma once

#include <span>
#include <string>

#include "kernels/kernel.h"

namespace hetero {

struct Isa {
  const KernelSet* kernels;
  uint32_t needs;  // bits of CpuFeature
  bool emulated;   // tile code over emulated intrinsics: for tests, chosen only by name
};

std::span<const Isa> isas();  // from the plainest to the best, as this processor goes
bool runs_here(const Isa& isa);

// The kernel set called `name`; with an empty name the one that HETERO_ISA names, else the best
// that runs here. Throws std::runtime_error naming what runs here when it is unknown or needs
// another processor.
const KernelSet& select_kernels(const std::string& name);

}  // namespace hetero
