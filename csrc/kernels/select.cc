#include "kernels/select.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "cpu/isa.h"

namespace hetero {
namespace {

const Isa kIsas[] = {
    {&kernels_scalar, kNoFeature, false},
    {&kernels_avx512bf16_emulated, kNoFeature, true},
    {&kernels_amx_emulated, kNoFeature, true},
#if defined(__x86_64__)
    {&kernels_avx2, kAvx2, false},
    {&kernels_avx512, kAvx2 | kAvx512, false},
    {&kernels_avx512vnni, kAvx2 | kAvx512 | kAvx512Vnni, false},
    {&kernels_avx512bf16, kAvx2 | kAvx512 | kAvx512Bf16, false},
    {&kernels_amx, kAvx2 | kAvx512 | kAvx512Bf16 | kAmx, false},
#endif
};

// From the plainest to the best.
std::vector<Isa> in_order() {
  std::vector<Isa> all(std::begin(kIsas), std::end(kIsas));
#if defined(__x86_64__)
  const auto place = [&](const KernelSet& kernels) {
    return std::find_if(all.begin(), all.end(),
                        [&](const Isa& isa) { return isa.kernels == &kernels; });
  };
  if (halves_bf16_products()) {
    std::iter_swap(place(kernels_avx512vnni), place(kernels_avx512bf16));
  }
#endif
  return all;
}

std::string runnable_names() {
  std::string names;
  for (const Isa& isa : isas()) {
    if (runs_here(isa) && !isa.emulated)
      names += (names.empty() ? "" : ", ") + std::string(isa.kernels->name);
  }
  return names;
}

}  // namespace

std::span<const Isa> isas() {
  static const std::vector<Isa> all = in_order();
  return all;
}

bool runs_here(const Isa& isa) { return (isa.needs & ~cpu_features()) == 0; }

const KernelSet& select_kernels(const std::string& name) {
  std::string wanted = name;
  const char* variable = std::getenv("HETERO_ISA");
  if (wanted.empty() && variable != nullptr) wanted = variable;
  const KernelSet* best = nullptr;
  for (const Isa& isa : isas()) {
    const bool match = wanted.empty() ? !isa.emulated : wanted == isa.kernels->name;
    if (match && runs_here(isa)) best = isa.kernels;
  }
  if (best == nullptr) {
    throw std::runtime_error("instruction set '" + wanted + "'" +
                             (name.empty() ? " (from HETERO_ISA)" : "") +
                             " is unknown or not for this processor; it runs " + runnable_names());
  }
  return *best;
}

}  // namespace hetero
