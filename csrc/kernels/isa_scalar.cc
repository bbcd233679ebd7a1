#include "kernels/tile_scalar.h"
#define HETERO_ISA scalar
#include "kernels/isa.inl.h"
