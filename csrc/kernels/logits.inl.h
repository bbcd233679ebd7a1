// Rows of logits: maximum, exponential sums, gradient. Both sampling and the training
// log-probability use them, so the two agree bit for bit.
#pragma once

#include "kernels/norm.inl.h"

namespace hetero {
namespace {

void cap_logits(float* x, int n, float factor, float softcap) {
  using F = typename V::F;
  const F f = V::set1(factor);
  if (softcap == 0.0f) {
    sweep<V>(n, [&](int i, int count) { put<V>(x + i, V::mul(get<V>(x + i, count), f), count); });
    return;
  }
  const F cap = V::set1(softcap), inverse = V::set1(1.0f / softcap);
  sweep<V>(n, [&](int i, int count) {
    const F z = V::mul(V::mul(get<V>(x + i, count), f), inverse);
    put<V>(x + i, V::mul(cap, tanh_of<V>(z)), count);
  });
}

float max_logit(const float* x, int n, bool* finite) {
  using F = typename V::F;
  // v - v is NaN for NaN and +inf; -inf was lifted to a finite value first.
  const float odd = sweep_sum<V>(n, [&](int i, int count) {
    const F v = V::max(V::set1(-3e38f), get<V>(x + i, count));
    return V::sub(v, v);
  });
  *finite = odd == 0.0f;
  return row_max<V>(x, n);
}

void exp_logits(const LogitRow& row, const float* x, float* sums, float* moments, float* weights) {
  using F = typename V::F;
  const F m = V::set1(row.max), t = V::set1(row.inverse_temperature);
  // A masked logit of -inf has weight 0; its z must stay finite in z exp(z).
  const F least = V::set1(-1e30f);
  for (int start = 0, b = 0; start < row.n; start += kSumBlock, ++b) {
    const int n = row.n - start < kSumBlock ? row.n - start : kSumBlock;
    const float* in = x + start;
    F moment = V::zero();
    sums[b] = sweep_sum<V>(n, [&](int i, int count) {
      const F z = V::max(least, V::mul(V::sub(get<V>(in + i, count), m), t));
      F e = V::exp(z);
      if (count < V::kLanes) e = V::head(e, V::zero(), count);
      if (moments != nullptr) moment = V::fma(z, e, moment);
      if (weights != nullptr) put<V>(weights + start + i, e, count);
      return e;
    });
    if (moments != nullptr) moments[b] = V::sum(moment);
  }
}

void sum_blocks(const float* weights, int n, float* sums) {
  for (int start = 0, b = 0; start < n; start += kSumBlock, ++b) {
    const int size = n - start < kSumBlock ? n - start : kSumBlock;
    sums[b] =
        sweep_sum<V>(size, [&](int i, int count) { return get<V>(weights + start + i, count); });
  }
}

int find_above(const float* x, int from, int n, float bound) {
  for (int i = from; i < n; i += V::kLanes) {
    const int count = n - i < V::kLanes ? n - i : V::kLanes;
    auto v = get<V>(x + i, count);
    if (count < V::kLanes) v = V::head(v, V::set1(bound), count);
    if (!(V::hmax(v) > bound)) continue;
    for (int j = i; j < i + count; ++j) {
      if (x[j] > bound) return j;
    }
  }
  return n;
}

void clear_below(float* x, int n, float least) {
  const auto bound = V::set1(least);
  sweep<V>(n, [&](int i, int count) {
    const auto v = get<V>(x + i, count);
    put<V>(x + i, V::select_gt(bound, v, V::zero(), v), count);
  });
}

void logits_backward(const LogitRow& row, const float* x, float inverse_total, int target,
                     float gradient, float softcap, uint16_t* dx) {
  using F = typename V::F;
  const F m = V::set1(row.max), t = V::set1(row.inverse_temperature);
  const F inverse = V::set1(inverse_total), g = V::set1(gradient), one = V::set1(1.0f);
  const F inverse_cap = V::set1(softcap == 0.0f ? 0.0f : 1.0f / softcap);
  const auto emit = [&](int i, int count, F hit) {
    const F v = get<V>(x + i, count);
    const F p = V::mul(V::exp(V::mul(V::sub(v, m), t)), inverse);
    F d = V::mul(V::sub(hit, p), g);
    if (softcap != 0.0f) {
      const F y = V::mul(v, inverse_cap);
      d = V::mul(d, V::fma(neg<V>(y), y, one));
    }
    put<V>(dx + i, d, count);
  };
  sweep<V>(row.n, [&](int i, int count) { emit(i, count, V::zero()); });
  emit(target, 1, one);
}

}  // namespace
}  // namespace hetero
