// Every row kernel, and the conversions that fit nowhere else.
#pragma once

#include "kernels/activation.inl.h"
#include "kernels/attention.inl.h"
#include "kernels/logits.inl.h"
#include "kernels/norm.inl.h"

namespace hetero {
namespace {

void to_bf16(const float* x, uint16_t* y, int n) {
  sweep<V>(n, [&](int i, int count) { put<V>(y + i, get<V>(x + i, count), count); });
}

void to_float(const uint16_t* x, float* y, int n) {
  sweep<V>(n, [&](int i, int count) { put<V>(y + i, get<V>(x + i, count), count); });
}

void add(const float* x, float* y, int n) {
  sweep<V>(n, [&](int i, int count) {
    put<V>(y + i, V::add(get<V>(x + i, count), get<V>(y + i, count)), count);
  });
}

}  // namespace
}  // namespace hetero
