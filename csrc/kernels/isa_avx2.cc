#include "kernels/bytes_avx2.h"
#include "kernels/codes_avx2.h"
#include "kernels/tile_avx2.h"
#include "kernels/vec_avx2.h"
#define HETERO_ISA avx2
#define HETERO_VEC VecAvx2
#define HETERO_PEAK "kernels/peak_fma.h"
#include "kernels/isa.inl.h"
