#include "kernels/bytes_none.h"
#include "kernels/codes_scalar.h"
#include "kernels/tile_scalar.h"
#include "kernels/vec_scalar.h"
#define HETERO_ISA scalar
#define HETERO_VEC VecScalar
#define HETERO_PEAK "kernels/peak_fma.h"
#include "kernels/isa.inl.h"
