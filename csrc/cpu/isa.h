// What this processor and operating system can execute.
#pragma once

#include <cstdint>

namespace hetero {

enum CpuFeature : uint32_t {
  kNoFeature = 0,
  kAvx2 = 1u << 0,        // AVX2, FMA and F16C
  kAvx512 = 1u << 1,      // AVX-512 F, BW, DQ, VL
  kAvx512Vnni = 1u << 2,  // VPDPBUSD
  kAvx512Bf16 = 1u << 3,  // VDPBF16PS
  kAmx = 1u << 4,         // AMX-TILE and AMX-BF16, with the kernel's permission for the tile state
};

// Bits of CpuFeature; found once. Asking for AMX requests the permission from Linux for this
// process.
uint32_t cpu_features();

// Whether VDPBF16PS, where there is one, does half the multiply-adds per second that VFMADD does on
// fp32. Intel's processors since Sapphire Rapids leave bf16 to AMX, which not every virtual machine
// passes on: measured on Emerald Rapids, 0.18 beside 0.37 TFLOP/s on two threads.
bool halves_bf16_products();

}  // namespace hetero
