// The tile is written over what is included before it.
// clang-format off
#include "kernels/amx_native.h"
#include "kernels/turn_avx512.h"
#include "kernels/tile_amx.h"
#include "kernels/vec_avx512.h"
#include "kernels/codes_avx512.h"
// clang-format on
#include "kernels/bytes_none.h"
#define HETERO_ISA amx
#define HETERO_VEC VecAvx512
#define HETERO_PEAK "kernels/peak_amx.h"
#include "kernels/isa.inl.h"
