// Elementary functions over any Vec (vec_<isa>.h). No STL, no libm: an element's bits depend on its
// value and on the ISA only, never on its lane or on its neighbours. Units that include this must
// be compiled with -ffp-contract=off, or the compiler may fuse a tail differently from the main
// loop.
#pragma once

namespace hetero {
namespace {

// exp() is finite for every finite argument: it saturates at exp(88) = 1.7e38. Below -87 it is
// exactly 0: results under the smallest normal number would take a microcode assist, thirty times
// the time of a vector, and every masked attention score would meet it.
inline constexpr float kExpMax = 88.0f;
inline constexpr float kExpMin = -87.0f;

// x = n ln 2 + r with |r| <= ln 2 / 2. Returns exp(r) - 1 and writes n, for x in [kExpMin, kExpMax]
// or NaN. Coefficients: near-minimax fit of (exp(r) - 1 - r) / r^2, relative error of exp(r) 3e-9.
template <class V>
inline typename V::F exp_reduced(typename V::F x, typename V::F* n) {
  using F = typename V::F;
  const F magic = V::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  *n = V::sub(V::fma(x, V::set1(1.44269504f), magic), magic);
  F r = V::fma(*n, V::set1(-0.693359375f), x);  // exact: the constant has 9 significant bits
  r = V::fma(*n, V::set1(2.12194440e-4f), r);
  F p = V::set1(0x1.6a23ccp-10f);
  p = V::fma(p, r, V::set1(0x1.123a20p-7f));
  p = V::fma(p, r, V::set1(0x1.5558f2p-5f));
  p = V::fma(p, r, V::set1(0x1.555492p-3f));
  p = V::fma(p, r, V::set1(0x1.fffffcp-2f));
  return V::fma(p, V::mul(r, r), r);
}

template <class V>
inline typename V::F exp_of(typename V::F x) {
  using F = typename V::F;
  // max/min return their second operand when either is NaN, and NaN is not below kExpMin: it passes
  // through.
  const F inside = V::max(V::set1(kExpMin), V::min(V::set1(kExpMax), x));
  F n;
  const F q = exp_reduced<V>(inside, &n);
  return V::select_gt(V::set1(kExpMin), x, V::zero(), V::scale2(V::add(q, V::set1(1.0f)), n));
}

// exp(x) - 1 for x <= 0, without cancellation near 0.
template <class V>
inline typename V::F expm1_neg_of(typename V::F x) {
  using F = typename V::F;
  x = V::max(V::set1(kExpMin), x);
  F n;
  const F q = exp_reduced<V>(x, &n);
  const F s = V::scale2(V::set1(1.0f), n);
  return V::fma(q, s, V::sub(s, V::set1(1.0f)));
}

template <class V>
inline typename V::F neg(typename V::F x) {
  return V::sub(V::zero(), x);
}

// 1 / (1 + exp(-x)) for x >= 0, exp(x) / (1 + exp(x)) below: the exponential never exceeds 1, and
// the result is exactly 0 under -87, so that x sigmoid(x) vanishes for huge negative x.
template <class V>
inline typename V::F sigmoid_of(typename V::F x) {
  using F = typename V::F;
  const F one = V::set1(1.0f);
  const F e = V::exp(neg<V>(V::abs(x)));
  return V::div(V::select_gt(V::zero(), x, e, one), V::add(one, e));
}

template <class V>
inline typename V::F tanh_of(typename V::F x) {
  using F = typename V::F;
  const F e = expm1_neg_of<V>(V::mul(V::set1(-2.0f), V::abs(x)));
  const F t = V::div(neg<V>(e), V::add(V::set1(2.0f), e));
  return V::copysign(t, x);
}

// Standard normal distribution function. erfc(z) = exp(-z^2) t P(t), t = 1 / (1 + z / 2), z >= 0:
// own near-minimax fit, relative error 5e-8, so the far negative tail keeps its relative accuracy.
template <class V>
inline typename V::F normal_cdf_of(typename V::F x) {
  using F = typename V::F;
  const F one = V::set1(1.0f);
  const F z = V::mul(V::abs(x), V::set1(0.70710678f));
  const F t = V::div(one, V::fma(z, V::set1(0.5f), one));
  F p = V::set1(-0.05938683822751045f);
  p = V::fma(p, t, V::set1(0.2861258089542389f));
  p = V::fma(p, t, V::set1(-0.4904102385044098f));
  p = V::fma(p, t, V::set1(0.28173771500587463f));
  p = V::fma(p, t, V::set1(-0.029151607304811478f));
  p = V::fma(p, t, V::set1(0.20375382900238037f));
  p = V::fma(p, t, V::set1(0.24283477663993835f));
  p = V::fma(p, t, V::set1(0.2824121415615082f));
  p = V::fma(p, t, V::set1(0.28208431601524353f));
  // exp(-x^2 / 2) from x itself: squaring the rounded z would cost accuracy in the tail.
  const F gauss = V::exp(V::mul(V::mul(x, x), V::set1(-0.5f)));
  const F half_erfc = V::mul(V::mul(gauss, t), V::mul(p, V::set1(0.5f)));
  return V::select_gt(x, V::zero(), V::sub(one, half_erfc), half_erfc);
}

}  // namespace
}  // namespace hetero
