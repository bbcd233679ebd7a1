// Array<T, kDims>: a C-contiguous tensor in CPU memory as an argument of a bound function, without
// a copy.
//
// bf16 is uint16_t here. A tensor that requires grad is read like any other: autograd is Python's
// job. torch (2.9 and later) hands its tensors over through DLPack's C exchange table in some 50
// ns; everything else takes nanobind's general way, which costs microseconds per argument. An
// engine step passes a thousand of them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <type_traits>

namespace hetero {

namespace nb = nanobind;

namespace dlpack {

// The stable part of the DLPack C ABI, version 1.
struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeTable {
  uint32_t major, minor;
  ExchangeTable* previous;
  void* owning_functions[3];
  int (*borrow)(void* object, Tensor* out);
};

inline bool borrow(nb::handle object, Tensor* out) {
  static constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  // Types come and go, but in practice there are two: torch.Tensor and torch.nn.Parameter.
  thread_local PyObject* known_type = nullptr;
  thread_local const ExchangeTable* known_table = nullptr;
  if (type != known_type) {
    nb::object capsule = nb::steal(PyObject_GetAttrString(type, kAttribute));
    void* table = capsule.is_valid() && PyCapsule_CheckExact(capsule.ptr())
                      ? PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api")
                      : nullptr;
    PyErr_Clear();
    known_type = type;
    known_table = static_cast<const ExchangeTable*>(table);
    if (known_table != nullptr && (known_table->major != 1 || known_table->borrow == nullptr)) {
      known_table = nullptr;
    }
    if (known_table != nullptr) Py_INCREF(type);  // so that its address is never another type's
    if (known_table == nullptr) known_type = nullptr;
  }
  if (known_table == nullptr) return false;
  if (known_table->borrow(object.ptr(), out) == 0) return true;
  PyErr_Clear();
  return false;
}

enum Code : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

template <class T>
constexpr bool holds(uint8_t code, uint8_t bits) {
  if (bits != 8 * sizeof(T)) return false;
  if constexpr (std::is_same_v<T, bool>) return code == kBool;
  if constexpr (std::is_floating_point_v<T>) return code == kFloat;
  if constexpr (std::is_same_v<T, uint16_t>) return code == kUint || code == kBfloat;
  return code == (std::is_signed_v<T> ? kInt : kUint);
}

}  // namespace dlpack

template <class T, int kDims>
class Array {
 public:
  T* data() const { return data_; }
  int64_t shape(int dim) const { return shape_[dim]; }
  int64_t size() const {
    int64_t count = 1;
    for (int64_t extent : shape_) count *= extent;
    return count;
  }

  bool assign(const dlpack::Tensor& tensor) {
    constexpr int kCpu = 1, kPinned = 3;
    if (tensor.device_type != kCpu && tensor.device_type != kPinned) return false;
    if (tensor.num_dims != kDims || tensor.lanes != 1) return false;
    if (!dlpack::holds<std::remove_const_t<T>>(tensor.code, tensor.bits)) return false;
    for (int dim = 0; dim < kDims; ++dim) shape_[dim] = tensor.shape[dim];
    int64_t stride = 1;
    for (int dim = kDims - 1; tensor.strides != nullptr && dim >= 0; --dim) {
      if (shape_[dim] != 1 && tensor.strides[dim] != stride && size() != 0) return false;
      stride *= shape_[dim];
    }
    data_ = reinterpret_cast<T*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
    return true;
  }

 private:
  T* data_ = nullptr;
  std::array<int64_t, kDims> shape_{};
};

}  // namespace hetero

namespace nanobind::detail {

template <class T, int kDims>
struct type_caster<hetero::Array<T, kDims>> {
  using Argument = hetero::Array<T, kDims>;
  NB_TYPE_CASTER(Argument, const_name("Array"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    hetero::dlpack::Tensor tensor;
    if (hetero::dlpack::borrow(source, &tensor)) return value.assign(tensor);
    try {
      ndarray<> array;
      if (!try_cast(source, array)) return false;
      int64_t shape[8], strides[8];
      if (array.ndim() > 8) return false;
      for (size_t dim = 0; dim < array.ndim(); ++dim) {
        shape[dim] = static_cast<int64_t>(array.shape(dim));
        strides[dim] = array.stride(dim);
      }
      const dlpack::dtype type = array.dtype();
      tensor = {array.data(),      array.device_type(),
                array.device_id(), static_cast<int32_t>(array.ndim()),
                type.code,         type.bits,
                type.lanes,        shape,
                strides,           0};
      return value.assign(tensor);
    } catch (...) {
      return false;
    }
  }
};

}  // namespace nanobind::detail
