// What the binding files share: array types of the arguments and one bind function per group.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace hetero {

namespace nb = nanobind;

// Arrays come from torch through DLPack without a copy; bf16 is passed as a uint16 view.
template <class T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

void bind_context(nb::module_& module);
void bind_rows(nb::module_& module);

}  // namespace hetero
