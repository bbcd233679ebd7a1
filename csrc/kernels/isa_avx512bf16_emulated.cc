// The tile is written over what is included before it.
// clang-format off
#include "kernels/bf16dot_emulated.h"
#include "kernels/turn_scalar.h"
#include "kernels/tile_avx512bf16.h"
#include "kernels/vec_scalar.h"
#include "kernels/codes_scalar.h"
// clang-format on
#include "kernels/bytes_none.h"
#define HETERO_ISA avx512bf16_emulated
#define HETERO_VEC VecScalar
#define HETERO_PEAK "kernels/peak_bf16dot.h"
#include "kernels/isa.inl.h"
