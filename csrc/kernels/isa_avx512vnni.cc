#include "kernels/bytes_avx512.h"
#include "kernels/codes_avx512.h"
#include "kernels/tile_avx512.h"
#include "kernels/vec_avx512.h"
#define HETERO_ISA avx512vnni
#define HETERO_VEC VecAvx512
#define HETERO_PEAK "kernels/peak_fma.h"
#include "kernels/isa.inl.h"
