#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings/bind.h"
#include "cpu/topology.h"
#include "kernels/select.h"
#include "ops/context.h"

namespace hetero {
namespace {

// (name, runs on this processor, emulated) of every ISA, from the plainest to the best.
std::vector<std::tuple<std::string, bool, bool>> list_isas() {
  std::vector<std::tuple<std::string, bool, bool>> rows;
  for (const Isa& isa : isas()) rows.emplace_back(isa.kernels->name, runs_here(isa), isa.emulated);
  return rows;
}

std::vector<std::string> list_kernels() {
  return {
#define HETERO_KERNEL(result, kernel, parameters) #kernel,
#include "kernels/kernels.inc"
#undef HETERO_KERNEL
  };
}

}  // namespace

void bind_context(nb::module_& module) {
  nb::class_<Context>(module, "Context")
      .def(nb::init<int, const std::string&, int>(), nb::arg("num_threads") = 0,
           nb::arg("isa") = "", nb::arg("num_nodes") = 0)
      .def_prop_ro("num_threads", &Context::num_threads)
      .def_prop_ro("num_nodes", &Context::num_nodes)
      .def_prop_ro("isa", [](const Context& context) { return context.kernels().name; });
  module.def("isas", &list_isas);
  module.def("kernels", &list_kernels);
  module.def("usable_cores", &usable_cores);
}

}  // namespace hetero
