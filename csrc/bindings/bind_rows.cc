#include "bindings/bind.h"
#include "ops/rows.h"

// Arrays are passed as addresses: a DLPack hand-over costs 2.6 microseconds per tensor, an address
// 0.1, and a decode step passes thousands. hetero.kernels.cpu.rows checks shapes, dtypes and layout
// before it calls.
namespace hetero {
namespace {

using Address = uintptr_t;

void* out(Address address) { return reinterpret_cast<void*>(address); }
const void* in(Address address) { return reinterpret_cast<const void*>(address); }
Dtype dtype(bool bf16) { return bf16 ? Dtype::kBf16 : Dtype::kF32; }

}  // namespace

void bind_rows(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Norm>(module, "Norm")
      .def("__init__", [](Norm* norm, int n, float eps, float offset, bool round_first, bool x_bf16,
                          bool weight_bf16) {
        new (norm) Norm{n, eps, offset, round_first, dtype(x_bf16), dtype(weight_bf16)};
      });
  nb::class_<Gate>(module, "Gate")
      .def("__init__", [](Gate* gate, int kind, bool clamp, float limit, float alpha) {
        new (gate) Gate{static_cast<Activation>(kind), clamp, limit, alpha};
      });
  module.def(
      "rms_norm",
      [](Context& c, const Norm& norm, Address x, Address weight, Address y, int64_t rows) {
        rms_norm(c, norm, in(x), in(weight), out(y), rows);
      },
      unlocked);
  module.def(
      "rms_norm_backward",
      [](Context& c, const Norm& norm, Address x, Address weight, Address dy, Address dx,
         int64_t rows) { rms_norm_backward(c, norm, in(x), in(weight), in(dy), out(dx), rows); },
      unlocked);
  module.def(
      "activate",
      [](Context& c, int kind, Address x, Address y, int64_t n, bool bf16) {
        activate(c, static_cast<Activation>(kind), in(x), out(y), n, dtype(bf16));
      },
      unlocked);
  module.def(
      "activate_backward",
      [](Context& c, int kind, Address x, Address dy, Address dx, int64_t n, bool bf16) {
        activate_backward(c, static_cast<Activation>(kind), in(x), in(dy), out(dx), n, dtype(bf16));
      },
      unlocked);
  module.def(
      "gate",
      [](Context& c, const Gate& kind, Address g, Address up, Address y, int64_t n, bool bf16) {
        gate(c, kind, in(g), in(up), out(y), n, dtype(bf16));
      },
      unlocked);
  module.def(
      "gate_backward",
      [](Context& c, const Gate& kind, Address g, Address up, Address dy, Address dgate,
         Address dup, int64_t n, bool bf16) {
        gate_backward(c, kind, in(g), in(up), in(dy), out(dgate), out(dup), n, dtype(bf16));
      },
      unlocked);
  module.def(
      "softmax",
      [](Context& c, Address x, Address y, int64_t rows, int n, bool bf16) {
        softmax(c, in(x), static_cast<float*>(out(y)), rows, n, dtype(bf16));
      },
      unlocked);
  module.def(
      "softmax_backward",
      [](Context& c, Address y, Address dy, Address dx, int64_t rows, int n, bool bf16) {
        softmax_backward(c, static_cast<const float*>(in(y)), static_cast<const float*>(in(dy)),
                         out(dx), rows, n, dtype(bf16));
      },
      unlocked);
  module.def(
      "topk",
      [](Context& c, Address x, Address ids, int64_t rows, int n, int k) {
        topk(c, static_cast<const float*>(in(x)), static_cast<int64_t*>(out(ids)), rows, n, k);
      },
      unlocked);
}

}  // namespace hetero
