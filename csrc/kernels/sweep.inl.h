// Loops over a row: full vectors, then one masked vector through the same body.
#pragma once

#include <stdint.h>

#include "kernels/row_types.h"

namespace hetero {
namespace {

using V = Vec;  // of this instruction set

template <class V>
inline typename V::F get(const float* p, int n) {
  return n >= V::kLanes ? V::load(p) : V::load_n(p, n);
}
template <class V>
inline typename V::F get(const uint16_t* p, int n) {
  return n >= V::kLanes ? V::load_bf16(p) : V::load_bf16_n(p, n);
}
template <class V>
inline void put(float* p, typename V::F v, int n) {
  if (n >= V::kLanes) {
    V::store(p, v);
  } else {
    V::store_n(p, v, n);
  }
}
template <class V>
inline void put(uint16_t* p, typename V::F v, int n) {
  if (n >= V::kLanes) {
    V::store_bf16(p, v);
  } else {
    V::store_bf16_n(p, v, n);
  }
}

// Rounds to the precision of T and back.
template <class V>
inline typename V::F rounded(typename V::F v, const float*) {
  return v;
}
template <class V>
inline typename V::F rounded(typename V::F v, const uint16_t*) {
  return V::round_bf16(v);
}

// body(i, count) for every vector of a row of n elements.
template <class V, class Body>
inline void sweep(int n, Body body) {
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) body(i, V::kLanes);
  if (i < n) body(i, n - i);
}

// Sum of term(i, count) over a row, in four interleaved accumulators. term must give 0 in the lanes
// beyond count.
template <class V, class Term>
inline float sweep_sum(int n, Term term) {
  using F = typename V::F;
  F a = V::zero(), b = V::zero(), c = V::zero(), d = V::zero();
  int i = 0;
  for (; i + 4 * V::kLanes <= n; i += 4 * V::kLanes) {
    a = V::add(a, term(i, V::kLanes));
    b = V::add(b, term(i + V::kLanes, V::kLanes));
    c = V::add(c, term(i + 2 * V::kLanes, V::kLanes));
    d = V::add(d, term(i + 3 * V::kLanes, V::kLanes));
  }
  for (; i + V::kLanes <= n; i += V::kLanes) a = V::add(a, term(i, V::kLanes));
  if (i < n) b = V::add(b, term(i, n - i));
  return V::sum(V::add(V::add(a, b), V::add(c, d)));
}

// Runs body(const float*) or body(const uint16_t*): a tag that carries the element type.
template <class Body>
inline void by_dtype(Dtype dtype, Body body) {
  if (dtype == Dtype::kBf16) {
    body(static_cast<const uint16_t*>(nullptr));
  } else {
    body(static_cast<const float*>(nullptr));
  }
}

template <class T>
inline T* as(void* p, const T*) {
  return static_cast<T*>(p);
}
template <class T>
inline const T* as(const void* p, const T*) {
  return static_cast<const T*>(p);
}

}  // namespace
}  // namespace hetero
