// Amx in plain C++: lets the AMX tile run, and be tested, on any processor. Stops the program where
// the processor would: at a tile instruction on a thread that has not configured its tiles.
#pragma once

#include "kernels/flush.h"

namespace hetero {
namespace {

struct Amx {
  static void configure() {
    configured_ = true;
    std::memset(tiles_, 0, sizeof(tiles_));
  }
  static void release() { configured_ = false; }

  template <int kTile>
  static void zero() {
    std::memset(tile<kTile>(), 0, sizeof(tiles_[0]));
  }
  template <int kTile>
  static void load(const void* p, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tile<kTile>() + row * 16, static_cast<const char*>(p) + row * stride, 64);
    }
  }
  template <int kTile>
  static void store(void* p, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(static_cast<char*>(p) + row * stride, tile<kTile>() + row * 16, 64);
    }
  }
  // Even and odd products are summed apart over the 16 pairs, then together, then to c.
  template <int kC, int kA, int kB>
  static void dot() {
    const uint32_t *a = tile<kA>(), *b = tile<kB>();
    for (int row = 0; row < 16; ++row) {
      float even[16] = {}, odd[16] = {}, c[16];
      for (int pair = 0; pair < 16; ++pair) {
        const float a_even = even_of(a[row * 16 + pair]), a_odd = odd_of(a[row * 16 + pair]);
        for (int col = 0; col < 16; ++col) {
          even[col] = flush(even[col] + a_even * even_of(b[pair * 16 + col]));
          odd[col] = flush(odd[col] + a_odd * odd_of(b[pair * 16 + col]));
        }
      }
      std::memcpy(c, tile<kC>() + row * 16, 64);
      for (int col = 0; col < 16; ++col)
        c[col] = flush(flush(c[col]) + flush(even[col] + odd[col]));
      std::memcpy(tile<kC>() + row * 16, c, 64);
    }
  }

 private:
  template <int kTile>
  static uint32_t* tile() {
    if (!configured_) __builtin_trap();
    return tiles_[kTile];
  }

  static thread_local bool configured_;
  static thread_local uint32_t tiles_[8][256];
};

thread_local bool Amx::configured_ = false;
thread_local uint32_t Amx::tiles_[8][256];

}  // namespace
}  // namespace hetero
