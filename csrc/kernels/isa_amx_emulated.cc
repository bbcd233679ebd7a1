// The tile is written over what is included before it.
// clang-format off
#include "kernels/amx_emulated.h"
#include "kernels/turn_scalar.h"
#include "kernels/tile_amx.h"
#include "kernels/vec_scalar.h"
#include "kernels/codes_scalar.h"
// clang-format on
#include "kernels/bytes_none.h"
#define HETERO_ISA amx_emulated
#define HETERO_VEC VecScalar
#define HETERO_PEAK "kernels/peak_amx.h"
#include "kernels/isa.inl.h"
