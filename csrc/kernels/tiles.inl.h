// What happens to the fp32 tiles [rows][32] that gemm makes.
#pragma once

#include "kernels/sweep.inl.h"

namespace hetero {
namespace {

void add_scaled(const float* x, float scale, float* y, int n) {
  const auto factor = V::set1(scale);
  sweep<V>(n, [&](int i, int count) {
    put<V>(y + i, V::fma(factor, get<V>(x + i, count), get<V>(y + i, count)), count);
  });
}

void add_bias(float* tile, int rows, const float* bias) {
  for (int row = 0; row < rows; ++row, tile += kPanel) {
    for (int i = 0; i < kPanel; i += V::kLanes) {
      V::store(tile + i, V::add(V::load(tile + i), V::load(bias + i)));
    }
  }
}

void store_tile(const float* tile, int rows, int columns, void* out, ptrdiff_t ldo, Dtype dtype) {
  by_dtype(dtype, [&](auto* t) {
    auto* to = as(out, t);
    for (int row = 0; row < rows; ++row, tile += kPanel, to += ldo) {
      sweep<V>(columns, [&](int i, int count) { put<V>(to + i, get<V>(tile + i, count), count); });
    }
  });
}

void load_tile(const uint16_t* from, ptrdiff_t ldf, int rows, float* tile) {
  for (int row = 0; row < rows; ++row, tile += kPanel, from += ldf) {
    for (int i = 0; i < kPanel; i += V::kLanes) V::store(tile + i, V::load_bf16(from + i));
  }
}

void dot_rows(const float* a, const float* b, int rows, float* out) {
  for (int row = 0; row < rows; ++row, a += kPanel, b += kPanel) {
    auto sum = V::zero();
    for (int i = 0; i < kPanel; i += V::kLanes) sum = V::fma(V::load(a + i), V::load(b + i), sum);
    out[row] = V::sum(sum);
  }
}

float dot_mixed(const float* x, const uint16_t* y, int n) {
  return sweep_sum<V>(
      n, [&](int i, int count) { return V::mul(get<V>(x + i, count), get<V>(y + i, count)); });
}

void weighted_sum(const float* const* rows, const float* weights, int count, int n, float* out) {
  sweep<V>(n, [&](int i, int lanes) {
    auto sum = V::zero();
    for (int row = 0; row < count; ++row) {
      sum = V::fma(V::set1(weights[row]), get<V>(rows[row] + i, lanes), sum);
    }
    put<V>(out + i, sum, lanes);
  });
}

}  // namespace
}  // namespace hetero
