// Codes of one lane, and the contract of every Codes, which decoders and encoders are written
// against. I is an integer of 32 bits per lane.
//   table(16 floats); table(16 floats, room for 16, f): of f(each)
//   pick(v, table): the entry that the low four bits of every lane name
//   load_words(p): a word of 32 bits per lane
//   from_int8(p): a signed byte per lane; from_e4m3(p): a byte per lane, its value / 256
//   from_digit(word): the lowest byte of every lane, less 128
//   nibbles(p, odd): four bits per lane, in its low bits, from p on; one lane alone has those of *p
//   that `odd` names
//   scale_odd, scale_f16, scale_e8m0(p): see Scale in formats/format.h
//   bump(v), bump_even(v): adds what makes truncation to bf16 round to nearest (ties upwards, to
//   even); store_pairs(p, even, odd): truncates both and stores bf16 pairs (even, odd)
//   bits(v), number(v): the same bits as I and as F; integer(v): v, a whole number, as I
//   set, add, both (bitwise and), left<n>, right<n> (without sign)
//   store_words, store_halves, store_bytes(p, v): the low bits of every lane
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/vec_scalar.h"

namespace hetero {
namespace {

struct Codes {
  using F = float;
  using I = uint32_t;
  using Table = const float*;

  static Table table(const float* values) { return values; }
  template <class Map>
  static Table table(const float* values, float* room, const Map& map) {
    for (int i = 0; i < 16; ++i) room[i] = map(values[i]);
    return room;
  }
  static I load_words(const void* p) {
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
  }
  static F pick(I index, Table table) { return table[index & 15]; }
  static I nibbles(const std::byte* p, int odd) { return static_cast<I>(*p) >> (4 * odd); }
  static F from_int8(const void* p) { return static_cast<float>(*static_cast<const int8_t*>(p)); }
  static F from_digit(I word) { return static_cast<float>(static_cast<int>(word & 255) - 128); }
  static F from_e4m3(const void* p) {
    const uint32_t byte = *static_cast<const uint8_t*>(p);
    return half((byte & 0x80) << 8 | (byte & 0x7f) << 7);
  }

  static F scale_odd(const uint16_t* p) {
    return float_of(static_cast<uint32_t>(*p) << 15 | 0x4000);
  }
  static F scale_f16(const uint16_t* p) { return half(*p); }
  static F scale_e8m0(const uint8_t* p) { return float_of(static_cast<uint32_t>(*p) << 23); }

  static F bump(F v) { return float_of(bits_of(v) + 0x8000); }
  static F bump_even(F v) { return float_of(bits_of(v) + 0x7fff + ((bits_of(v) >> 16) & 1)); }
  static void store_pairs(uint16_t* p, F even, F odd) {
    p[0] = static_cast<uint16_t>(bits_of(even) >> 16);
    p[1] = static_cast<uint16_t>(bits_of(odd) >> 16);
  }
  static void prefetch(const void*) {}

  static I bits(F v) { return bits_of(v); }
  static F number(I v) { return float_of(v); }
  static I integer(F v) { return static_cast<uint32_t>(static_cast<int32_t>(v)); }
  static I set(int v) { return static_cast<uint32_t>(v); }
  static I add(I a, I b) { return a + b; }
  static I both(I a, I b) { return a & b; }
  template <int kBits>
  static I left(I v) {
    return v << kBits;
  }
  template <int kBits>
  static I right(I v) {
    return v >> kBits;
  }
  static void store_words(void* p, I v) { memcpy(p, &v, sizeof(v)); }
  static void store_halves(void* p, I v) { memcpy(p, &v, sizeof(uint16_t)); }
  static void store_bytes(void* p, I v) { memcpy(p, &v, 1); }

 private:
  static uint32_t bits_of(float v) {
    uint32_t b;
    memcpy(&b, &v, sizeof(b));
    return b;
  }
  static float float_of(uint32_t b) {
    float v;
    memcpy(&v, &b, sizeof(v));
    return v;
  }
  // Finite halves.
  static float half(uint32_t h) {
    const uint32_t sign = (h & 0x8000) << 16, rest = (h & 0x7fff) << 13;
    constexpr uint32_t kOne = 113u << 23;  // 2^-14, the least normal half
    const float value =
        (h & 0x7c00) != 0 ? float_of(rest + (112u << 23)) : float_of(rest | kOne) - float_of(kOne);
    return float_of(bits_of(value) | sign);
  }
};

}  // namespace
}  // namespace hetero
