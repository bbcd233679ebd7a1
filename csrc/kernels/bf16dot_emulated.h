// Bf16Dot in plain C++: lets the AVX512-BF16 tile run, and be tested, on any processor.
#pragma once

#include "base/dtype.h"
#include "kernels/flush.h"

namespace hetero {
namespace {

struct Bf16Dot {
  struct Sum {
    float lane[16];
  };
  struct Pairs {
    uint32_t lane[16];
  };

  static Sum zero() { return {}; }
  static Sum load(const float* p) {
    Sum v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void store(float* p, Sum v) { std::memcpy(p, &v, sizeof(v)); }
  static Pairs load_pairs(const uint16_t* p) {
    Pairs v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static Pairs broadcast(const uint32_t* pair) {
    Pairs v;
    for (uint32_t& lane : v.lane) lane = *pair;
    return v;
  }
  static void prefetch(const void*) {}
  static Sum dot(Sum sum, Pairs a, Pairs b) {
    for (int i = 0; i < 16; ++i) {
      float s = flush(sum.lane[i]);
      s = flush(s + odd_of(a.lane[i]) * odd_of(b.lane[i]));
      sum.lane[i] = flush(s + even_of(a.lane[i]) * even_of(b.lane[i]));
    }
    return sum;
  }
};

}  // namespace
}  // namespace hetero
