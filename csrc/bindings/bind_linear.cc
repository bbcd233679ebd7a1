#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "bindings/bind.h"
#include "bindings/packed.h"
#include "formats/bf16.h"
#include "ops/linear.h"

namespace hetero {
namespace {

// Packs [e, n, k] row major; one task per panel.
template <class T>
void pack(Context& context, Array<const T, 3> weight, Array<uint16_t, 1> packed) {
  const auto e = weight.shape(0);
  const int n = static_cast<int>(weight.shape(1)), k = static_cast<int>(weight.shape(2));
  const Matrix matrix{packed.data(), n, k};
  HETERO_CHECK(static_cast<size_t>(packed.size()) == e * matrix.size(), "packed size is ",
               packed.size());
  const int panels = matrix.n_pad() / kPanel;
  nb::gil_scoped_release release;
  context.place_panels(e, panels, [&](int64_t i, int panel, int) {
    bf16::pack_panel(weight.data() + i * n * k, n, k, panel * kPanel,
                     packed.data() + (i * panels + panel) * matrix.k_pad() * kPanel);
  });
}

void unpack(Context& context, Array<const uint16_t, 1> packed, Array<uint16_t, 3> weight) {
  const auto e = weight.shape(0);
  const int n = static_cast<int>(weight.shape(1)), k = static_cast<int>(weight.shape(2));
  const Matrix matrix{packed.data(), n, k};
  HETERO_CHECK(static_cast<size_t>(packed.size()) == e * matrix.size(), "packed size is ",
               packed.size());
  const int panels = matrix.n_pad() / kPanel;
  nb::gil_scoped_release release;
  context.parallel(e * panels, [&](int64_t task, int) {
    bf16::unpack_panel(packed.data() + task * matrix.k_pad() * kPanel, n, k,
                       static_cast<int>(task % panels) * kPanel,
                       weight.data() + task / panels * n * k);
  });
}

struct LoraArgs {
  std::optional<LowRank> value;

  LoraArgs(const std::optional<Flat>& a, const std::optional<Flat>& b,
           const std::optional<Array<uint16_t, 2>>& xa, int rank, float scale, int n, int k,
           int64_t num_rows) {
    if (!a) return;
    HETERO_CHECK(b && xa, "LoRA needs a, b and xa");
    value = LowRank{matrix_of(*a, rank, k), matrix_of(*b, n, rank), scale, xa->data(), 0, num_rows};
    HETERO_CHECK(xa->shape(0) == num_rows && xa->shape(1) == value->a.n_pad(),
                 "xa has the wrong shape");
  }
  const LowRank* get() const { return value ? &*value : nullptr; }
};

// LoRA of runs of rows: the i-th has those up to ends[i] and is a[i], b[i]; None: no LoRA.
std::vector<LowRank> runs_of(const std::vector<std::optional<Flat>>& a,
                             const std::vector<std::optional<Flat>>& b,
                             const std::vector<int64_t>& ends,
                             const std::optional<Array<uint16_t, 2>>& xa, int rank, float scale,
                             int n, int k, int64_t num_rows) {
  HETERO_CHECK(a.size() == ends.size() && b.size() == ends.size() &&
                   (ends.empty() || (ends.back() == num_rows && xa)),
               "the runs of LoRA do not cover the rows");
  std::vector<LowRank> runs;
  int64_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    HETERO_CHECK(begin <= ends[i] && a[i].has_value() == b[i].has_value(),
                 "the runs of LoRA are not in order");
    if (a[i] && begin < ends[i]) {
      LowRank low{matrix_of(*a[i], rank, k), matrix_of(*b[i], n, rank), scale};
      const int64_t width = low.a.n_pad();
      HETERO_CHECK(xa->shape(0) == num_rows && xa->shape(1) == width, "xa has the wrong shape");
      low.xa = xa->data() + begin * width;
      low.first = begin;
      low.num_rows = ends[i] - begin;
      runs.push_back(low);
    }
    begin = ends[i];
  }
  return runs;
}

void forward(Context& context, Array<const uint16_t, 2> x, Flat weight, const Format* format,
             std::optional<Array<const float, 1>> bias,
             const std::vector<std::optional<Flat>>& lora_a,
             const std::vector<std::optional<Flat>>& lora_b, const std::vector<int64_t>& ends,
             std::optional<Array<uint16_t, 2>> xa, int rank, float scale, const Out& out_array) {
  const OutArgs out(out_array);
  const int n = static_cast<int>(out.columns), k = static_cast<int>(x.shape(1));
  const auto lora = runs_of(lora_a, lora_b, ends, xa, rank, scale, n, k, x.shape(0));
  HETERO_CHECK(x.shape(0) == out.rows, "x and out differ in rows");
  HETERO_CHECK(!bias || bias->shape(0) == n, "bias has the wrong size");
  const Linear args{
      x.data(), x.shape(0), matrix_of(weight, n, k, 1, format), bias ? bias->data() : nullptr, lora,
      out.data, out.dtype};
  nb::gil_scoped_release release;
  linear(context, args);
}

void backward(Context& context, Array<const uint16_t, 2> dout, Flat weight, const Format* format,
              Array<const uint16_t, 2> x, std::optional<Flat> lora_a, std::optional<Flat> lora_b,
              std::optional<Array<uint16_t, 2>> xa, int rank, float scale,
              const std::optional<Out>& dx_array, std::optional<Array<float, 2>> da,
              std::optional<Array<float, 2>> db) {
  const int n = static_cast<int>(dout.shape(1)), k = static_cast<int>(x.shape(1));
  const int64_t rows = dout.shape(0);
  const LoraArgs lora(lora_a, lora_b, xa, rank, scale, n, k, rows);
  LinearBackward args{dout.data(), rows, matrix_of(weight, n, k, 1, format), lora.get(), x.data()};
  HETERO_CHECK(!lora.get() || x.shape(0) == rows, "x and dout differ in rows");
  HETERO_CHECK(!da || (lora.get() && da->shape(0) == rank && da->shape(1) == k),
               "da has the wrong shape");
  HETERO_CHECK(!db || (lora.get() && db->shape(0) == n && db->shape(1) == rank),
               "db has the wrong shape");
  if (dx_array) {
    const OutArgs dx(*dx_array);
    HETERO_CHECK(dx.rows == rows && dx.columns == k, "dx has the wrong shape");
    args.dx = dx.data;
    args.dx_dtype = dx.dtype;
  }
  args.da = da ? da->data() : nullptr;
  args.db = db ? db->data() : nullptr;
  nb::gil_scoped_release release;
  linear_backward(context, args);
}

}  // namespace

void bind_linear(nb::module_& module) {
  module.def("pack", &pack<uint16_t>, nb::arg("context"), nb::arg("weight"), nb::arg("packed"));
  module.def("pack", &pack<float>, nb::arg("context"), nb::arg("weight"), nb::arg("packed"));
  module.def("unpack", &unpack, nb::arg("context"), nb::arg("packed"), nb::arg("weight"));
  module.def("linear", &forward, nb::arg("context"), nb::arg("x"), nb::arg("weight"),
             nb::arg("format").none(), nb::arg("bias").none(), nb::arg("lora_a"), nb::arg("lora_b"),
             nb::arg("ends"), nb::arg("xa").none(), nb::arg("rank"), nb::arg("scale"),
             nb::arg("out"));
  module.def("linear_backward", &backward, nb::arg("context"), nb::arg("dout"), nb::arg("weight"),
             nb::arg("format").none(), nb::arg("x"), nb::arg("lora_a").none(),
             nb::arg("lora_b").none(), nb::arg("xa").none(), nb::arg("rank"), nb::arg("scale"),
             nb::arg("dx").none(), nb::arg("da").none(), nb::arg("db").none());
}

}  // namespace hetero
