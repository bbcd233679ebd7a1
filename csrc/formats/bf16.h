// The bf16 format: a weight [N, K] becomes panels [N/32][K/2][32][2], N and K padded with zeros.
//
// Element (n, k) lies in panel n / 32 at [k / 2][n % 32][k % 2]. Pairs along K are what VDPBF16PS
// and AMX multiply; AVX2 and AVX-512 split a pair with a shift and a mask.
#pragma once

#include <cstdint>

namespace hetero::bf16 {

constexpr int kPanelRows = 32;

// Packs rows first..first+31 (those beyond n are zero) of a row-major [n, k] matrix into `panel`,
// [k_pad/2][32][2]. fp32 is rounded to nearest even.
void pack_panel(const uint16_t* weight, int n, int k, int first, uint16_t* panel);
void pack_panel(const float* weight, int n, int k, int first, uint16_t* panel);

// The inverse: rows first..first+31 (as far as there are) back into a row-major [n, k] matrix.
void unpack_panel(const uint16_t* panel, int n, int k, int first, uint16_t* weight);

}  // namespace hetero::bf16
