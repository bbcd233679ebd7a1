// Turn: transposition of squares of 32-bit elements (pairs of bf16), in plain C++. See
// turned.inl.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace hetero {
namespace {

struct Turn {
  static constexpr int kSize = 4;
  struct I {
    uint32_t lane[kSize];
  };

  static I zero() { return {}; }
  static I load(const void* p) {
    I v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  // The first n bf16, zeros after them.
  static I load_n(const uint16_t* p, int n) {
    I v = {};
    std::memcpy(&v, p, sizeof(uint16_t) * n);
    return v;
  }
  static void store(void* p, I v) { std::memcpy(p, &v, sizeof(v)); }
  static void store_n(void* p, I v, int n) { std::memcpy(p, &v, sizeof(uint32_t) * n); }

  static void transpose(I* r) {
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < i; ++j) {
        const uint32_t held = r[i].lane[j];
        r[i].lane[j] = r[j].lane[i];
        r[j].lane[i] = held;
      }
    }
  }

  // Of four rows: columns of four elements in 128 bits each, i + 4 j in the j-th of r[i].
  static void fours(I* r) { transpose(r); }
  static I flip(I v, uint32_t bits) {
    for (uint32_t& lane : v.lane) lane ^= bits;
    return v;
  }

  // Interleaves the 16-bit elements of the low (high) halves of every 128 bits of a and b.
  static I low16(I a, I b) { return interleave(a, b, 0); }
  static I high16(I a, I b) { return interleave(a, b, 2); }

  // The even and odd bf16 of the pairs, as fp32.
  static I even(I v) {
    for (uint32_t& lane : v.lane) lane <<= 16;
    return v;
  }
  static I odd(I v) {
    for (uint32_t& lane : v.lane) lane &= 0xffff0000u;
    return v;
  }

 private:
  static I interleave(I a, I b, int from) {
    I v;
    for (int i = 0; i < 2; ++i) {
      const uint32_t x = a.lane[from + i], y = b.lane[from + i];
      v.lane[2 * i] = (x & 0xffffu) | (y << 16);
      v.lane[2 * i + 1] = (x >> 16) | (y & 0xffff0000u);
    }
    return v;
  }
};

}  // namespace
}  // namespace hetero
