#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings/bind.h"
#include "bindings/packed.h"
#include "moe/layer.h"

namespace hetero {
namespace {

using Floats = Array<float, 3>;
using OptionalFloats = std::optional<Floats>;

// The objects below point into tensors that the Python side keeps alive.
void init_experts(Experts* self, int num_experts, int hidden, int intermediate, Flat gate_up,
                  Flat down, const Format* gate_up_format, const Format* down_format,
                  std::optional<Array<const float, 2>> gate_up_bias,
                  std::optional<Array<const float, 2>> down_bias, const Gate& gate) {
  Experts experts;
  experts.num_experts = num_experts;
  experts.hidden = hidden;
  experts.intermediate = intermediate;
  experts.down = matrix_of(down, hidden, intermediate, num_experts, down_format);
  const int rows = 2 * experts.i_pad();
  experts.gate_up = matrix_of(gate_up, rows, hidden, num_experts, gate_up_format);
  const auto bias = [&](const std::optional<Array<const float, 2>>& array,
                        int width) -> const float* {
    if (!array) return nullptr;
    HETERO_CHECK(array->shape(0) == num_experts && array->shape(1) == width,
                 "bias has the wrong shape");
    return array->data();
  };
  experts.gate_up_bias = bias(gate_up_bias, rows);
  experts.down_bias = bias(down_bias, experts.down.n_pad());
  experts.gate = gate;
  new (self) Experts(experts);
}

void init_lora(ExpertLora* self, const Experts& experts, std::optional<Flat> gate_up_a,
               std::optional<Flat> gate_up_b, std::optional<Flat> down_a,
               std::optional<Flat> down_b, int gate_up_rank, int down_rank, bool shared_gate_up_a,
               bool shared_down_b, float scale) {
  ExpertLora lora;
  lora.shared_gate_up_a = shared_gate_up_a;
  lora.shared_down_b = shared_down_b;
  lora.scale = scale;
  const int e = experts.num_experts;
  if (gate_up_a) {
    HETERO_CHECK(gate_up_b, "gate_up_a without gate_up_b");
    lora.gate_up_b = matrix_of(*gate_up_b, 2 * experts.i_pad(), gate_up_rank, e);
    lora.gate_up_a = matrix_of(*gate_up_a, 2 * lora.gate_up_rank_pad(), experts.hidden,
                               shared_gate_up_a ? 1 : e);
  }
  if (down_a) {
    HETERO_CHECK(down_b, "down_a without down_b");
    lora.down_a = matrix_of(*down_a, down_rank, experts.intermediate, e);
    lora.down_b = matrix_of(*down_b, experts.hidden, down_rank, shared_down_b ? 1 : e);
  }
  new (self) ExpertLora(lora);
}

// Adapters of runs of tokens: the i-th has those up to ends[i]. None: no adapter.
std::vector<LoraRun> runs_of(const std::vector<const ExpertLora*>& loras,
                             const std::vector<int64_t>& ends, int64_t tokens) {
  HETERO_CHECK(loras.size() == ends.size() && (ends.empty() || ends.back() == tokens),
               "the runs of LoRA do not cover the tokens");
  const ExpertLora* first = nullptr;
  std::vector<LoraRun> runs;
  int64_t begin = 0;
  for (size_t i = 0; i < loras.size(); ++i) {
    const ExpertLora* lora = loras[i];
    if (first == nullptr) first = lora;
    HETERO_CHECK(
        lora == nullptr ||
            (lora->has_gate_up() == first->has_gate_up() && lora->has_down() == first->has_down() &&
             lora->gate_up_b.k == first->gate_up_b.k && lora->down_a.n == first->down_a.n &&
             lora->shared_gate_up_a == first->shared_gate_up_a &&
             lora->shared_down_b == first->shared_down_b),
        "the LoRA of one run has other parts, ranks or layout than that of another");
    HETERO_CHECK(begin <= ends[i], "the runs of LoRA are not in order");
    runs.push_back({{begin, ends[i]}, lora});
    begin = ends[i];
  }
  return runs;
}

std::unique_ptr<Saved> forward(Context& context, const Experts& experts,
                               const std::vector<const ExpertLora*>& loras,
                               const std::vector<int64_t>& ends, Array<const uint16_t, 2> x,
                               Array<const int64_t, 2> ids, Array<const float, 2> weights,
                               const Out& out_array, bool save, bool keep_pre) {
  const OutArgs out(out_array);
  const int64_t tokens = x.shape(0);
  const std::vector<LoraRun> lora = runs_of(loras, ends, tokens);
  HETERO_CHECK(!save || lora.size() <= 1, "there is no backward through several adapters");
  HETERO_CHECK(x.shape(1) == experts.hidden && out.columns == experts.hidden && out.rows == tokens,
               "x or out has the wrong shape");
  HETERO_CHECK(
      ids.shape(0) == tokens && weights.shape(0) == tokens && weights.shape(1) == ids.shape(1),
      "ids or weights have the wrong shape");
  ExpertsForward args{&experts,
                      lora,
                      x.data(),
                      ids.data(),
                      weights.data(),
                      tokens,
                      static_cast<int>(ids.shape(1)),
                      out.data,
                      out.dtype,
                      save,
                      keep_pre};
  nb::gil_scoped_release release;
  return experts_forward(context, args);
}

void backward(Context& context, const Saved& saved, const Experts& experts, const ExpertLora* lora,
              Array<const uint16_t, 2> x, Array<const uint16_t, 2> dout,
              const std::optional<Out>& dx_array, std::optional<Array<float, 2>> dweights,
              OptionalFloats gate_a, OptionalFloats gate_b, OptionalFloats up_a,
              OptionalFloats up_b, OptionalFloats down_a, OptionalFloats down_b) {
  const int64_t tokens = saved.num_tokens, hidden = experts.hidden;
  const auto fits = [&](const auto& array) {
    return array.shape(0) == tokens && array.shape(1) == hidden;
  };
  HETERO_CHECK(fits(x) && fits(dout), "x or dout does not have the shape of the forward");
  ExpertsBackward args;
  args.experts = &experts;
  args.lora = lora;
  args.x = x.data();
  args.dout = dout.data();
  if (dx_array) {
    const OutArgs dx(*dx_array);
    HETERO_CHECK(dx.rows == tokens && dx.columns == hidden, "dx has the wrong shape");
    args.dx = dx.data;
    args.dx_dtype = dx.dtype;
  }
  if (dweights) {
    HETERO_CHECK(dweights->size() == tokens * saved.top_k, "dweights has the wrong shape");
    args.dweights = dweights->data();
  }
  // Shared factors come as stacks of one.
  const auto grad = [&](const OptionalFloats& array, bool present, bool shared, int rows,
                        int columns) -> float* {
    if (!array) return nullptr;
    HETERO_CHECK(lora != nullptr && present &&
                     array->shape(0) == (shared ? 1 : experts.num_experts) &&
                     array->shape(1) == rows && array->shape(2) == columns,
                 "a LoRA gradient has the wrong shape");
    return array->data();
  };
  if (lora != nullptr) {
    const int up_rank = lora->gate_up_b.k, down_rank = lora->down_a.n, size = experts.intermediate;
    const bool up = lora->has_gate_up(), down = lora->has_down();
    const bool shared_a = lora->shared_gate_up_a, shared_b = lora->shared_down_b;
    const int h = experts.hidden;
    args.grads = {
        grad(gate_a, up, shared_a, up_rank, h),     grad(up_a, up, shared_a, up_rank, h),
        grad(gate_b, up, false, size, up_rank),     grad(up_b, up, false, size, up_rank),
        grad(down_a, down, false, down_rank, size), grad(down_b, down, shared_b, h, down_rank)};
  }
  nb::gil_scoped_release release;
  experts_backward(context, saved, args);
}

}  // namespace

void bind_moe(nb::module_& module) {
  nb::class_<Experts>(module, "Experts")
      .def("__init__", &init_experts, nb::arg("num_experts"), nb::arg("hidden"),
           nb::arg("intermediate"), nb::arg("gate_up"), nb::arg("down"),
           nb::arg("gate_up_format").none(), nb::arg("down_format").none(),
           nb::arg("gate_up_bias").none(), nb::arg("down_bias").none(), nb::arg("gate"));
  nb::class_<ExpertLora>(module, "ExpertLora")
      .def("__init__", &init_lora, nb::arg("experts"), nb::arg("gate_up_a").none(),
           nb::arg("gate_up_b").none(), nb::arg("down_a").none(), nb::arg("down_b").none(),
           nb::arg("gate_up_rank"), nb::arg("down_rank"), nb::arg("shared_gate_up_a"),
           nb::arg("shared_down_b"), nb::arg("scale"));
  nb::class_<Saved>(module, "SavedExperts")
      .def_ro("num_tokens", &Saved::num_tokens)
      .def_ro("top_k", &Saved::top_k);
  module.def("experts_forward", &forward, nb::arg("context"), nb::arg("experts"), nb::arg("loras"),
             nb::arg("ends"), nb::arg("x"), nb::arg("ids"), nb::arg("weights"), nb::arg("out"),
             nb::arg("save"), nb::arg("keep_pre"));
  module.def("experts_backward", &backward, nb::arg("context"), nb::arg("saved"),
             nb::arg("experts"), nb::arg("lora").none(), nb::arg("x"), nb::arg("dout"),
             nb::arg("dx").none(), nb::arg("dweights").none(), nb::arg("gate_a").none(),
             nb::arg("gate_b").none(), nb::arg("up_a").none(), nb::arg("up_b").none(),
             nb::arg("down_a").none(), nb::arg("down_b").none());
}

}  // namespace hetero
