#include "base/check.h"
#include "bindings/array.h"
#include "bindings/bind.h"
#include "ops/probe.h"

namespace hetero {

void bind_probe(nb::module_& module) {
  module.def(
      "read_stream",
      [](Context& context, Array<const uint8_t, 1> data) {
        HETERO_CHECK(data.size() % 64 == 0, "data has ", data.size(),
                     " bytes; expected a multiple of 64");
        nb::gil_scoped_release release;
        return read_stream(context, data.data(), data.size());
      },
      nb::arg("context"), nb::arg("data"));
  module.def(
      "run_multiply_adds",
      [](Context& context, int64_t rounds) {
        nb::gil_scoped_release release;
        return run_multiply_adds(context, rounds);
      },
      nb::arg("context"), nb::arg("rounds"));
}

}  // namespace hetero
