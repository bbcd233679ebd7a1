// The row side of attention: masks, soft-cap, online softmax and its gradient over blocks of 32
// columns.
#pragma once

#include "kernels/sweep.inl.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

constexpr int kColumns = 32;

void pack_columns(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, uint16_t* panel) {
  for (int first = 0; first < kColumns; first += Turn::kSize) {
    turn_rows(row_ptrs + first, rows - first, k, k_pad,
              [&](int pair, Turn::I v) { Turn::store(panel + (pair * kColumns + first) * 2, v); });
  }
}

// 32 floats in registers.
template <class V>
struct Row32 {
  static constexpr int kVectors = kColumns / V::kLanes;
  typename V::F v[kVectors];
};

// The scaled and capped scores of one row; -inf outside [lo, hi). `slope`, where asked, is d score
// / d s.
template <class V>
inline Row32<V> visible_scores(const Scores& scores, const float* s, int lo, int hi,
                               Row32<V>* slope) {
  using F = typename V::F;
  const F scale = V::set1(scores.scale), low = V::set1(-__builtin_inff());
  const F cap = V::set1(scores.softcap);
  const F inverse_cap = V::set1(scores.softcap == 0.0f ? 0.0f : 1.0f / scores.softcap);
  Row32<V> z;
  for (int j = 0; j < Row32<V>::kVectors; ++j) {
    const int first = j * V::kLanes;
    F x = V::mul(V::load(s + first), scale);
    if (scores.softcap != 0.0f) {
      const F tanh = tanh_of<V>(V::mul(x, inverse_cap));
      x = V::mul(cap, tanh);
      if (slope != nullptr) slope->v[j] = V::mul(scale, V::fma(neg<V>(tanh), tanh, V::set1(1.0f)));
    } else if (slope != nullptr) {
      slope->v[j] = scale;
    }
    if (hi < first + V::kLanes) x = V::head(x, low, hi - first);
    if (lo > first) x = V::head(low, x, lo - first);
    z.v[j] = x;
  }
  return z;
}

template <class V>
inline float row32_max(const Row32<V>& r) {
  typename V::F m = r.v[0];
  for (int j = 1; j < Row32<V>::kVectors; ++j) m = V::max(m, r.v[j]);
  return V::hmax(m);
}

template <class V>
inline float row32_sum(const Row32<V>& r) {
  typename V::F s = r.v[0];
  for (int j = 1; j < Row32<V>::kVectors; ++j) s = V::add(s, r.v[j]);
  return V::sum(s);
}

template <class V>
inline float exp_scalar(float x) {
  return V::hmax(V::exp(V::set1(x)));
}

void attend(const Scores& scores, const float* s, float* max, float* sum, float* factor,
            uint16_t* p) {
  const float low = -__builtin_inff();
  for (int r = 0; r < scores.rows; ++r, s += kColumns, p += kColumns) {
    factor[r] = 1.0f;
    if (scores.lo[r] >= scores.hi[r]) {
      for (int j = 0; j < kColumns; ++j) p[j] = 0;
      continue;
    }
    Row32<V> z = visible_scores<V>(scores, s, scores.lo[r], scores.hi[r], nullptr);
    const float block_max = row32_max(z);
    if (block_max > max[r]) {
      factor[r] = max[r] == low ? 0.0f : exp_scalar<V>(max[r] - block_max);
      max[r] = block_max;
    }
    const auto m = V::set1(max[r]);
    for (int j = 0; j < Row32<V>::kVectors; ++j) {
      z.v[j] = V::exp(V::sub(z.v[j], m));
      V::store_bf16(p + j * V::kLanes, z.v[j]);
    }
    sum[r] = sum[r] * factor[r] + row32_sum(z);
  }
}

void scale_rows(float* x, int rows, int ld, int n, const float* factor) {
  for (int r = 0; r < rows; ++r) {
    if (factor[r] == 1.0f) continue;
    float* row = x + static_cast<size_t>(r) * ld;
    const auto f = V::set1(factor[r]);
    sweep<V>(n,
             [&](int i, int count) { put<V>(row + i, V::mul(get<V>(row + i, count), f), count); });
  }
}

void attend_finish(const float* o, int n, const float* sink, float* max, float* sum,
                   uint16_t* out) {
  float factor = 1.0f;
  if (sink != nullptr) {
    const float m = *sink > *max ? *sink : *max;
    factor = exp_scalar<V>(*max - m);
    *sum = *sum * factor + exp_scalar<V>(*sink - m);
    *max = m;
  }
  // A row that sees nothing is 0. Adding 0 turns -0 into 0: whether a block that adds nothing was
  // walked or skipped must not show.
  const auto f = V::set1(*sum > 0.0f || *sum != *sum ? factor / *sum : 0.0f);
  sweep<V>(n, [&](int i, int count) {
    put<V>(out + i, V::add(V::mul(get<V>(o + i, count), f), V::zero()), count);
  });
}

// One row of the gradient. `lse` and `delta` are vectors, so that they may belong to the row or to
// the columns.
template <class V, class Lse, class Delta>
inline void attend_backward_row(const Scores& scores, int r, const float* s, const float* dp,
                                Lse lse, Delta delta, uint16_t* p, uint16_t* ds) {
  using F = typename V::F;
  Row32<V> slope;
  const Row32<V> z = visible_scores<V>(scores, s, scores.lo[r], scores.hi[r], &slope);
  for (int j = 0; j < Row32<V>::kVectors; ++j) {
    const int i = j * V::kLanes;
    const F w = V::exp(V::sub(z.v[j], lse(i)));
    if (p != nullptr) V::store_bf16(p + i, w);
    const F d = V::mul(V::mul(w, V::sub(V::load(dp + i), delta(i))), slope.v[j]);
    V::store_bf16(ds + i, d);
  }
}

void attend_backward(const Scores& scores, const float* s, const float* dp, const float* lse,
                     const float* delta, uint16_t* ds) {
  for (int r = 0; r < scores.rows; ++r, s += kColumns, dp += kColumns, ds += kColumns) {
    const auto row_lse = V::set1(lse[r]), row_delta = V::set1(delta[r]);
    attend_backward_row<V>(
        scores, r, s, dp, [&](int) { return row_lse; }, [&](int) { return row_delta; }, nullptr,
        ds);
  }
}

void attend_backward_keys(const Scores& scores, const float* s, const float* dp, const float* lse,
                          const float* delta, uint16_t* p, uint16_t* ds) {
  for (int r = 0; r < scores.rows; ++r) {
    const size_t at = static_cast<size_t>(r) * kColumns;
    attend_backward_row<V>(
        scores, r, s + at, dp + at, [&](int i) { return V::load(lse + i); },
        [&](int i) { return V::load(delta + i); }, p + at, ds + at);
  }
}

float dot_bf16(const uint16_t* x, const uint16_t* y, int n) {
  return sweep_sum<V>(
      n, [&](int i, int count) { return V::mul(get<V>(x + i, count), get<V>(y + i, count)); });
}

}  // namespace
}  // namespace hetero
