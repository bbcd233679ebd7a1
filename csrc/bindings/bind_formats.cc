#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "base/dtype.h"
#include "bindings/bind.h"
#include "bindings/packed.h"
#include "formats/bf16.h"
#include "formats/pack.h"
#include "formats/table.h"

namespace hetero {
namespace {

// One task per panel of e matrices: task(index of the matrix, its first row, panel).
template <class Task>
void each_panel(Context& context, const Matrix& matrix, int64_t e, Task task) {
  const int panels = matrix.n_pad() / kPanel;
  const size_t bytes = panel_bytes(*matrix.format, matrix.k_pad());
  auto* first = reinterpret_cast<std::byte*>(const_cast<uint16_t*>(matrix.data));
  context.place_panels(e, panels, [&](int64_t i, int panel, int thread) {
    task(i, panel * kPanel, first + bytes * (i * panels + panel), thread);
  });
}

// Quantises [e, n, k] row major.
template <class T>
void quantize(Context& context, const Format& format, Array<const T, 3> weight, bool least_squares,
              Array<uint16_t, 1> packed) {
  HETERO_CHECK(format.scheme != Scheme::kNone, "weights are never quantised to ", format.name,
               "; it takes the codes of a checkpoint");
  const auto e = weight.shape(0);
  const int n = static_cast<int>(weight.shape(1)), k = static_cast<int>(weight.shape(2));
  const Matrix matrix = matrix_of(packed, n, k, e, &format);
  std::atomic<int64_t> bad{-1};
  {
    nb::gil_scoped_release release;
    each_panel(context, matrix, e, [&](int64_t i, int first, std::byte* panel, int) {
      const T* from = weight.data() + i * n * k;
      constexpr Dtype kDtype = sizeof(T) == sizeof(float) ? Dtype::kF32 : Dtype::kBf16;
      const T* rows = from + static_cast<int64_t>(first) * k;
      if (!context.kernels().quantize(format, rows, kDtype, std::min(kPanel, n - first), k,
                                      least_squares, panel)) {
        bad = i;
      }
    });
  }
  HETERO_CHECK(bad < 0, "matrix ", bad.load(), " holds NaN or infinity, which ", format.name,
               " cannot hold; repair the checkpoint");
}

// Packs what a checkpoint holds: codes [e, n, k], scales and minima [e, rows, groups] as bits.
void import_codes(Context& context, const Format& format, Array<const uint8_t, 3> codes,
                  Array<const int32_t, 3> scales, std::optional<Array<const int32_t, 3>> minima,
                  int scale_rows, Array<uint16_t, 1> packed) {
  const auto e = codes.shape(0);
  const int n = static_cast<int>(codes.shape(1)), k = static_cast<int>(codes.shape(2));
  const Matrix matrix = matrix_of(packed, n, k, e, &format);
  HETERO_CHECK(format.kquant == KQuant::kNone || k % kSuper == 0, "rows of ", format.name,
               " are whole blocks of ", kSuper, " values, got ", k);
  HETERO_CHECK(scale_rows >= 1 &&
                   (format.scale == Scale::kPanelF32 ? scale_rows % kPanel == 0 : scale_rows == 1),
               "scales of ", format.name, " cannot stand for ", scale_rows, " rows");
  const auto fits = [&](const auto& array) {
    return array.shape(0) == e && array.shape(1) == ceil_div(n, scale_rows) &&
           array.shape(2) == ceil_div(k, format.group);
  };
  HETERO_CHECK(fits(scales), "scales have the wrong shape");
  HETERO_CHECK(minima.has_value() == format.has_min && (!minima || fits(*minima)),
               "minima have the wrong shape");
  const int64_t step = scales.shape(1) * scales.shape(2);
  nb::gil_scoped_release release;
  each_panel(context, matrix, e, [&](int64_t i, int first, std::byte* panel, int) {
    const auto bits = [&](const auto& array) {
      return reinterpret_cast<const uint32_t*>(array.data()) + i * step;
    };
    const CodedMatrix coded{
        codes.data() + i * n * k, bits(scales), minima ? bits(*minima) : nullptr, n, k, scale_rows};
    pack_codes(format, coded, first, panel);
  });
}

// The bf16 weights that the kernels compute with, [e, n, k].
void dequantize(Context& context, const Format& format, Array<uint16_t, 1> packed,
                Array<uint16_t, 3> weight) {
  const auto e = weight.shape(0);
  const int n = static_cast<int>(weight.shape(1)), k = static_cast<int>(weight.shape(2));
  const Matrix matrix = matrix_of(packed, n, k, e, &format);
  nb::gil_scoped_release release;
  Op op(context);
  const size_t size = static_cast<size_t>(matrix.k_pad()) * kPanel;
  auto* scratch = op.take<uint16_t>(size * context.num_threads());
  each_panel(context, matrix, e, [&](int64_t i, int first, std::byte* panel, int thread) {
    uint16_t* plain = scratch + size * thread;
    context.kernels().decode(format, panel, matrix.k_pad(), plain);
    bf16::unpack_panel(plain, n, k, first, weight.data() + i * n * k);
  });
}

}  // namespace

void bind_formats(nb::module_& module) {
  nb::class_<Format>(module, "Format")
      .def(
          "__init__",
          [](Format* self, const std::string& name, int group) {
            new (self) Format(format_named(name, group));
          },
          nb::arg("name"), nb::arg("group") = 0)
      .def_prop_ro("name", [](const Format& format) { return format.name; })
      .def_ro("group", &Format::group)
      .def("panel_bytes", [](const Format& format, int k_pad) {
        return static_cast<int64_t>(panel_bytes(format, k_pad));
      });
  module.def("formats", [] {
    std::vector<std::string> names;
    for (const Format& format : formats()) names.emplace_back(format.name);
    return names;
  });
  module.def("quantize", &quantize<uint16_t>);
  module.def("quantize", &quantize<float>);
  module.def("pack_codes", &import_codes, nb::arg("context"), nb::arg("format"), nb::arg("codes"),
             nb::arg("scales"), nb::arg("minima").none(), nb::arg("scale_rows"), nb::arg("packed"));
  module.def("dequantize", &dequantize);
}

}  // namespace hetero
