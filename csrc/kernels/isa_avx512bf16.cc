// The tile is written over what is included before it.
// clang-format off
#include "kernels/bf16dot_native.h"
#include "kernels/turn_avx512.h"
#include "kernels/tile_avx512bf16.h"
#include "kernels/vec_avx512.h"
#include "kernels/codes_avx512.h"
// clang-format on
#include "kernels/bytes_none.h"
#define HETERO_ISA avx512bf16
#define HETERO_VEC VecAvx512
#define HETERO_PEAK "kernels/peak_bf16dot.h"
#include "kernels/isa.inl.h"
