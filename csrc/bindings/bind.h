// One bind function per group of the extension; module.cc calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace hetero {

namespace nb = nanobind;

void bind_context(nb::module_& module);
void bind_formats(nb::module_& module);
void bind_rows(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_moe(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_probe(nb::module_& module);

}  // namespace hetero
