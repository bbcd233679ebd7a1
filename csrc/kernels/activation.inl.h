// Activations and gated activations, forward and backward. Finite for every finite input.
#pragma once

#include "kernels/sweep.inl.h"

namespace hetero {
namespace {

// value and, where asked, slope of act(x). `beta` scales the argument of the sigmoid in x
// sigmoid(beta x).
template <class V>
struct Curve {
  typename V::F value, slope;
};

template <class V, bool kSlope>
inline Curve<V> swish(typename V::F x, typename V::F beta) {
  using F = typename V::F;
  const F s = sigmoid_of<V>(V::mul(beta, x));
  const F value = V::mul(x, s);
  if (!kSlope) return {value, s};
  // s + beta x s (1 - s); the last product is 0 long before the bound on x, which keeps beta x
  // finite.
  const F near = V::max(V::set1(-1e6f), V::min(V::set1(1e6f), x));
  return {value, V::fma(V::mul(beta, near), V::mul(s, V::sub(V::set1(1.0f), s)), s)};
}

// x Phi(x), Phi the normal distribution; slope Phi(x) + x phi(x).
template <class V, bool kSlope>
inline Curve<V> gelu(typename V::F x) {
  using F = typename V::F;
  const F cdf = normal_cdf_of<V>(x);
  const F value = V::mul(x, cdf);
  if (!kSlope) return {value, cdf};
  // Beyond 40 the density is 0; the bound keeps x^2 finite.
  const F near = V::max(V::set1(-40.0f), V::min(V::set1(40.0f), x));
  const F density =
      V::mul(V::exp(V::mul(V::mul(near, near), V::set1(-0.5f))), V::set1(0.39894228f));
  return {value, V::fma(near, density, cdf)};
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as x sigmoid(2 ...).
template <class V, bool kSlope>
inline Curve<V> gelu_tanh(typename V::F x) {
  using F = typename V::F;
  const F near = V::max(V::set1(-40.0f), V::min(V::set1(40.0f), x));
  const F square = V::mul(near, near);
  const F one = V::set1(1.0f);
  const F inner =
      V::mul(V::mul(near, V::set1(1.5957691f)), V::fma(square, V::set1(0.044715f), one));
  const F s = sigmoid_of<V>(inner);
  const F value = V::mul(x, s);
  if (!kSlope) return {value, s};
  const F slope = V::mul(V::set1(1.5957691f), V::fma(square, V::set1(0.134145f), one));
  return {value, V::fma(V::mul(near, slope), V::mul(s, V::sub(one, s)), s)};
}

template <class V, bool kSlope>
inline Curve<V> curve(Activation kind, typename V::F x, float alpha) {
  using F = typename V::F;
  const F one = V::set1(1.0f);
  switch (kind) {
    case Activation::kGelu:
      return gelu<V, kSlope>(x);
    case Activation::kGeluTanh:
      return gelu_tanh<V, kSlope>(x);
    case Activation::kRelu:
      // max(0, x) passes NaN on; the slope at 0 is 0.
      return {V::max(V::zero(), x), V::select_gt(x, V::zero(), one, V::zero())};
    case Activation::kSigmoid: {
      const F s = sigmoid_of<V>(x);
      return {s, V::mul(s, V::sub(one, s))};
    }
    case Activation::kSwigluOss:
      return swish<V, kSlope>(x, V::set1(alpha));
    default:
      return swish<V, kSlope>(x, one);
  }
}

// The kind is a constant in every loop: body(Kind<...>()) is instantiated once per kind.
template <Activation kKind>
struct Kind {
  static constexpr Activation value = kKind;
};

template <class Body>
inline void by_kind(Activation kind, Body body) {
  switch (kind) {
    case Activation::kSilu:
      return body(Kind<Activation::kSilu>());
    case Activation::kGelu:
      return body(Kind<Activation::kGelu>());
    case Activation::kGeluTanh:
      return body(Kind<Activation::kGeluTanh>());
    case Activation::kRelu:
      return body(Kind<Activation::kRelu>());
    case Activation::kSigmoid:
      return body(Kind<Activation::kSigmoid>());
    case Activation::kSwigluOss:
      return body(Kind<Activation::kSwigluOss>());
  }
}

void activate(Activation kind, const void* x, void* y, int n, Dtype dtype) {
  by_dtype(dtype, [&](auto* t) {
    by_kind(kind, [&](auto k) {
      const auto* in = as(x, t);
      auto* out = as(y, t);
      sweep<V>(n, [&](int i, int count) {
        put<V>(out + i, curve<V, false>(decltype(k)::value, get<V>(in + i, count), 1.0f).value,
               count);
      });
    });
  });
}

void activate_backward(Activation kind, const void* x, const void* dy, void* dx, int n,
                       Dtype dtype) {
  by_dtype(dtype, [&](auto* t) {
    by_kind(kind, [&](auto k) {
      const auto *in = as(x, t), *grad = as(dy, t);
      auto* out = as(dx, t);
      sweep<V>(n, [&](int i, int count) {
        const auto c = curve<V, true>(decltype(k)::value, get<V>(in + i, count), 1.0f);
        put<V>(out + i, V::mul(c.slope, get<V>(grad + i, count)), count);
      });
    });
  });
}

// gate and up after the clamp, and 0 or 1 where the clamp cuts the gradient.
template <class V>
struct Clamped {
  typename V::F gate, up, gate_open, up_open;
};

template <class V>
inline Clamped<V> clamp_gate(const Gate& kind, typename V::F gate, typename V::F up) {
  using F = typename V::F;
  const F one = V::set1(1.0f), zero = V::zero();
  if (!kind.clamp) return {gate, up, one, one};
  const F high = V::set1(kind.limit), low = V::set1(-kind.limit);
  return {V::min(high, gate), V::max(low, V::min(high, up)), V::select_gt(gate, high, zero, one),
          V::select_gt(V::abs(up), high, zero, one)};
}

template <class V, class Body>
inline void by_gate(const Gate& kind, Dtype in, Dtype out_dtype, Body body) {
  by_kind(kind.kind, [&](auto k) {
    by_dtype(in, [&](auto* t) {
      if (out_dtype == Dtype::kBf16) {
        body(k, t, static_cast<const uint16_t*>(nullptr));
      } else {
        body(k, t, static_cast<const float*>(nullptr));
      }
    });
  });
}

void gate(const Gate& kind, const void* gate, const void* up, void* out, int n, Dtype in,
          Dtype out_dtype) {
  by_gate<V>(kind, in, out_dtype, [&](auto k, auto* t, auto* o) {
    constexpr Activation kKind = decltype(k)::value;
    const auto *g = as(gate, t), *u = as(up, t);
    auto* y = as(out, o);
    sweep<V>(n, [&](int i, int count) {
      const Clamped<V> c = clamp_gate<V>(kind, get<V>(g + i, count), get<V>(u + i, count));
      const auto a = curve<V, false>(kKind, c.gate, kind.alpha);
      const auto factor = kKind == Activation::kSwigluOss ? V::add(c.up, V::set1(1.0f)) : c.up;
      put<V>(y + i, V::mul(a.value, factor), count);
    });
  });
}

void gate_backward(const Gate& kind, const void* gate, const void* up, const void* dout,
                   void* dgate, void* dup, int n, Dtype in, Dtype out_dtype) {
  by_gate<V>(kind, in, out_dtype, [&](auto k, auto* t, auto* o) {
    constexpr Activation kKind = decltype(k)::value;
    const auto *g = as(gate, t), *u = as(up, t), *d = as(dout, t);
    auto *dg = as(dgate, o), *du = as(dup, o);
    sweep<V>(n, [&](int i, int count) {
      const Clamped<V> c = clamp_gate<V>(kind, get<V>(g + i, count), get<V>(u + i, count));
      const auto a = curve<V, true>(kKind, c.gate, kind.alpha);
      const auto factor = kKind == Activation::kSwigluOss ? V::add(c.up, V::set1(1.0f)) : c.up;
      const auto grad = get<V>(d + i, count);
      put<V>(dg + i, V::mul(V::mul(grad, factor), V::mul(a.slope, c.gate_open)), count);
      put<V>(du + i, V::mul(V::mul(grad, a.value), c.up_open), count);
    });
  });
}

}  // namespace
}  // namespace hetero
