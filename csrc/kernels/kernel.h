// KernelSet: every function that exists once per instruction set (ISA).
//
// kernels.inc lists them, one row each. An isa_<name>.cc file includes its tile and vector headers,
// then kernels/isa.inl.h, which includes the implementations (*.inl.h, written over those headers)
// and defines the table. Kernels use no STL and sit in an anonymous namespace: see isa.inl.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats/format.h"
#include "kernels/row_types.h"

namespace hetero {

// Columns of a packed panel, and the step of K: AMX multiplies 32 bf16 of K at once.
constexpr int kPanel = 32;

struct KernelSet {
  const char* name;
#define HETERO_KERNEL(result, kernel, parameters) result(*kernel) parameters;
#include "kernels/kernels.inc"
#undef HETERO_KERNEL
};

extern const KernelSet kernels_scalar;
extern const KernelSet kernels_avx2;
extern const KernelSet kernels_avx512;
extern const KernelSet kernels_avx512vnni;
extern const KernelSet kernels_avx512bf16;
extern const KernelSet kernels_avx512bf16_emulated;
extern const KernelSet kernels_amx;
extern const KernelSet kernels_amx_emulated;

}  // namespace hetero
