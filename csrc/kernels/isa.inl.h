// The body of every isa_<name>.cc, which first includes its tile, vector and byte headers (they
// define `Tile`, `Vec` and `Bytes`) and defines HETERO_ISA, HETERO_VEC and HETERO_PEAK (the header
// of its peak).
//
// Everything here has internal linkage and no STL is used: a weak symbol (an inline function, a
// template instance) compiled with -mavx512f could be chosen by the linker for code that runs on
// any processor. tests/kernels/test_isa_objects.py proves it with nm.
#include "kernels/kernel.h"

namespace hetero {
namespace {
using Vec = HETERO_VEC;
}  // namespace
}  // namespace hetero

#include "kernels/coded.inl.h"
#include "kernels/gemm.inl.h"
#include "kernels/pack.inl.h"
#include "kernels/quantize.inl.h"
#include "kernels/rows.inl.h"
#include "kernels/tiles.inl.h"
#include HETERO_PEAK

#define HETERO_JOIN_(a, b) a##b
#define HETERO_JOIN(a, b) HETERO_JOIN_(a, b)
#define HETERO_TEXT_(a) #a
#define HETERO_TEXT(a) HETERO_TEXT_(a)

namespace hetero {

const KernelSet HETERO_JOIN(kernels_, HETERO_ISA) = {
    HETERO_TEXT(HETERO_ISA),
#define HETERO_KERNEL(result, kernel, parameters) &kernel,
#include "kernels/kernels.inc"
#undef HETERO_KERNEL
};

}  // namespace hetero
