#include "kernels/tile_avx512.h"
#define HETERO_ISA avx512
#include "kernels/isa.inl.h"
