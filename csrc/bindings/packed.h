// Arguments that the binding files share: packed weights and outputs of either float type.
#pragma once

#include <variant>

#include "base/check.h"
#include "bindings/array.h"
#include "ops/product.h"

namespace hetero {

using Flat = Array<const uint16_t, 1>;  // packed panels

// `e` packed [n, k] matrices back to back; format null: bf16.
template <class T>
inline Matrix matrix_of(const Array<T, 1>& data, int n, int k, int64_t e = 1,
                        const Format* format = nullptr) {
  const Matrix matrix{data.data(), n, k, format};
  HETERO_CHECK(n > 0 && k > 0 && data.size() == e * static_cast<int64_t>(matrix.size()),
               "packed weight of ", data.size(), " values is not ", e, " packed [", n, ", ", k,
               "]");
  return matrix;
}

// A [rows, columns] tensor to write to, bf16 or fp32.
using Out = std::variant<Array<uint16_t, 2>, Array<float, 2>>;

struct OutArgs {
  void* data = nullptr;
  Dtype dtype = Dtype::kBf16;
  int64_t rows = 0, columns = 0;

  explicit OutArgs(const Out& out) {
    std::visit(
        [this](const auto& array) {
          data = array.data();
          dtype = sizeof(*array.data()) == 4 ? Dtype::kF32 : Dtype::kBf16;
          rows = array.shape(0);
          columns = array.shape(1);
        },
        out);
  }
};

}  // namespace hetero
