// RMS norm and softmax of one row.
#pragma once

#include "kernels/sweep.inl.h"

namespace hetero {
namespace {

template <class V, class T>
inline float inverse_rms(const T* x, int n, float eps) {
  const float squares = sweep_sum<V>(n, [&](int i, int count) {
    const typename V::F v = get<V>(x + i, count);
    return V::mul(v, v);
  });
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
}

template <class V, class T, class W>
inline void rms_norm_row(const Norm& norm, const T* x, const W* weight, T* y) {
  using F = typename V::F;
  const F r = V::set1(inverse_rms<V>(x, norm.n, norm.eps));
  const F offset = V::set1(norm.offset);
  sweep<V>(norm.n, [&](int i, int count) {
    F v = V::mul(get<V>(x + i, count), r);
    if (norm.round_first) v = rounded<V>(v, x);
    put<V>(y + i, V::mul(v, V::add(offset, get<V>(weight + i, count))), count);
  });
}

void rms_norm(const Norm& norm, const void* x, const void* weight, void* y) {
  by_dtype(norm.x, [&](auto* t) {
    by_dtype(norm.weight,
             [&](auto* w) { rms_norm_row<V>(norm, as(x, t), as(weight, w), as(y, t)); });
  });
}

// With g = dy (offset + weight) and r = 1 / rms: dx = r g - x r^3 / n sum(g x).
template <class V, class T, class W>
inline void rms_norm_backward_row(const Norm& norm, const T* x, const W* weight, const T* dy,
                                  T* dx) {
  using F = typename V::F;
  const float r = inverse_rms<V>(x, norm.n, norm.eps);
  const F offset = V::set1(norm.offset);
  const auto g = [&](int i, int count) {
    return V::mul(get<V>(dy + i, count), V::add(offset, get<V>(weight + i, count)));
  };
  const float dot = sweep_sum<V>(
      norm.n, [&](int i, int count) { return V::mul(g(i, count), get<V>(x + i, count)); });
  const F scale = V::set1(r), slope = V::set1(-r * r * r * (dot / static_cast<float>(norm.n)));
  sweep<V>(norm.n, [&](int i, int count) {
    const F d = V::fma(get<V>(x + i, count), slope, V::mul(g(i, count), scale));
    put<V>(dx + i, d, count);
  });
}

void rms_norm_backward(const Norm& norm, const void* x, const void* weight, const void* dy,
                       void* dx) {
  by_dtype(norm.x, [&](auto* t) {
    by_dtype(norm.weight, [&](auto* w) {
      rms_norm_backward_row<V>(norm, as(x, t), as(weight, w), as(dy, t), as(dx, t));
    });
  });
}

template <class V, class T>
inline float row_max(const T* x, int n) {
  using F = typename V::F;
  const F low = V::set1(-__builtin_inff());
  F m = low;
  sweep<V>(n, [&](int i, int count) {
    const F v = get<V>(x + i, count);
    m = V::max(m, count >= V::kLanes ? v : V::head(v, low, count));
  });
  return V::hmax(m);
}

void softmax(const void* x, float* y, int n, Dtype dtype) {
  using F = typename V::F;
  by_dtype(dtype, [&](auto* t) {
    const auto* row = as(x, t);
    const F m = V::set1(row_max<V>(row, n));
    const float total = sweep_sum<V>(n, [&](int i, int count) {
      const F e = V::exp(V::sub(get<V>(row + i, count), m));
      put<V>(y + i, e, count);
      return count >= V::kLanes ? e : V::head(e, V::zero(), count);
    });
    const F inverse = V::set1(1.0f / total);
    sweep<V>(
        n, [&](int i, int count) { put<V>(y + i, V::mul(get<V>(y + i, count), inverse), count); });
  });
}

void softmax_backward(const float* y, const float* dy, void* dx, int n, Dtype dtype) {
  using F = typename V::F;
  const F dot = V::set1(sweep_sum<V>(
      n, [&](int i, int count) { return V::mul(get<V>(y + i, count), get<V>(dy + i, count)); }));
  by_dtype(dtype, [&](auto* t) {
    auto* out = as(dx, t);
    sweep<V>(n, [&](int i, int count) {
      const F d = V::sub(get<V>(dy + i, count), dot);
      put<V>(out + i, V::mul(get<V>(y + i, count), d), count);
    });
  });
}

}  // namespace
}  // namespace hetero
