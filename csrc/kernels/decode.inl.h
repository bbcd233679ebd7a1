// From codes to bf16 weights, written over Codes (codes_<isa>.h): one decoder for each kind of
// code.
#pragma once

#include "formats/format.h"
#include "kernels/sweep.inl.h"

namespace hetero {
namespace {

// Two vectors of columns are decoded at a time.
constexpr int kSpan = 2 * V::kLanes;
constexpr int kPiece = 256;   // values of K that are decoded at a time: 16 KiB of weights
constexpr int kAhead = 1024;  // bytes of codes that are fetched ahead
const float kNoTable[16] = {};

// The scales (and minima) of two vectors of columns.
struct Scales {
  V::F scale[2], min[2];
};

inline V::F load_scale(Scale kind, const std::byte* from, int column) {
  const auto* halves = reinterpret_cast<const uint16_t*>(from) + column;
  switch (kind) {
    case Scale::kBf16:
      return V::load_bf16(halves);
    case Scale::kF16:
      return Codes::scale_f16(halves);
    case Scale::kOdd:
      return Codes::scale_odd(halves);
    case Scale::kE8m0:
      return Codes::scale_e8m0(reinterpret_cast<const uint8_t*>(from) + column);
    case Scale::kPanelF32:
      break;
  }
  float value;
  memcpy(&value, from, sizeof(value));
  return V::set1(value * 256.0f);  // Codes::from_e4m3 is 256 times too small
}

inline Scales load_scales(const Format& format, const std::byte* from, int column) {
  Scales scales;
  for (int i = 0; i < 2; ++i) {
    scales.scale[i] = load_scale(format.scale, from, column + i * V::kLanes);
    scales.min[i] = format.has_min ? load_scale(format.scale, from + scale_bytes(format),
                                                column + i * V::kLanes)
                                   : V::zero();
  }
  return scales;
}

// Decoders: slab(codes, column, table, scales, emit) calls emit(even, odd) for every pair of K of
// 32 values, with two vectors of weights each, to be truncated to bf16.
template <Rounding kRounding, bool kMin>
struct Weighing {
  // Whether the weights still have to be truncated.
  static constexpr bool kRough = kRounding != Rounding::kExact;

  static V::F weigh(V::F code, const Scales& scales, int i) {
    const V::F value =
        kMin ? V::fma(code, scales.scale[i], scales.min[i]) : V::mul(code, scales.scale[i]);
    if (kRounding == Rounding::kExact) return value;
    return kRounding == Rounding::kEven ? Codes::bump_even(value) : Codes::bump(value);
  }
};

template <Code kCode, Rounding kRounding, bool kMin>
struct ByteDecoder : Weighing<kRounding, kMin> {
  static constexpr int kStep = 8;

  template <class Emit>
  static void step(const std::byte* codes, int k, int column, const Codes::Table&,
                   const Scales& scales, Emit& emit) {
    for (int pair = k / 2; pair < (k + kStep) / 2; ++pair) {
      V::F weights[2][2];
      for (int odd = 0; odd < 2; ++odd) {
        for (int i = 0; i < 2; ++i) {
          const std::byte* from = codes + (2 * pair + odd) * kPanel + column + i * V::kLanes;
          const V::F code = kCode == Code::kInt8 ? Codes::from_int8(from) : Codes::from_e4m3(from);
          weights[odd][i] = ByteDecoder::weigh(code, scales, i);
        }
      }
      emit(weights[0], weights[1]);
    }
  }
};

template <Rounding kRounding, bool kMin>
struct TableDecoder : Weighing<kRounding, kMin> {
  template <int kBits, class Emit>
  static void pair(const Codes::I* words, const Codes::Table& table, const Scales& scales,
                   Emit& emit) {
    V::F even[2], odd[2];
    for (int i = 0; i < 2; ++i) {
      even[i] = TableDecoder::weigh(Codes::pick(Codes::shift<kBits>(words[i]), table), scales, i);
      odd[i] =
          TableDecoder::weigh(Codes::pick(Codes::shift<kBits + 4>(words[i]), table), scales, i);
    }
    emit(even, odd);
  }

  static constexpr int kStep = 8;

  template <class Emit>
  static void step(const std::byte* codes, int k, int column, const Codes::Table& table,
                   const Scales& scales, Emit& emit) {
    codes += (k / 8 * kPanel + column) * sizeof(uint32_t);
    const Codes::I words[2] = {Codes::load_words(codes),
                               Codes::load_words(codes + V::kLanes * sizeof(uint32_t))};
    pair<0>(words, table, scales, emit);
    pair<8>(words, table, scales, emit);
    pair<16>(words, table, scales, emit);
    pair<24>(words, table, scales, emit);
  }
};

// body(decoder) with the decoder of `format`.
template <class Body>
inline void by_format(const Format& format, Body body) {
  const bool even = format.rounding == Rounding::kEven;
  switch (format.code) {
    case Code::kFp8:
      return body(ByteDecoder<Code::kFp8, Rounding::kEven, false>());
    case Code::kInt8:
      if (format.has_min) return body(ByteDecoder<Code::kInt8, Rounding::kEven, true>());
      if (even) return body(ByteDecoder<Code::kInt8, Rounding::kEven, false>());
      return body(ByteDecoder<Code::kInt8, Rounding::kNoTies, false>());
    case Code::kTable4:
      if (format.has_min) return body(TableDecoder<Rounding::kEven, true>());
      if (even) return body(TableDecoder<Rounding::kEven, false>());
      return body(TableDecoder<Rounding::kExact, false>());
  }
}

// `count` values of K from `first` on (both multiples of 32) of a coded panel -> [count/2][32][2].
template <class Decoder>
inline void decode_slabs(const Format& format, const std::byte* panel, int k_pad, int first,
                         int count, uint16_t* out) {
  const Codes::Table table = Codes::table(format.table != nullptr ? format.table : kNoTable);
  for (int k = first; k < first + count; k += kPanel, out += kPanel * kPanel) {
    const std::byte* codes = panel + slab_bytes(format) * (k / kPanel);
    for (size_t byte = 0; byte < slab_bytes(format); byte += 64) {
      Codes::prefetch(codes + byte + kAhead);
    }
    const std::byte* scales = panel + scales_at(format, k_pad, k);
    for (int column = 0; column < kPanel; column += kSpan) {
      uint16_t* to = out + 2 * column;
      const Scales of_column = load_scales(format, scales, column);
      const auto store = [&](const V::F* even, const V::F* odd) {
        Codes::store_pairs(to, even[0], odd[0]);
        Codes::store_pairs(to + kSpan, even[1], odd[1]);
        to += 2 * kPanel;
      };
      for (int step = 0; step < kPanel; step += Decoder::kStep) {
        Decoder::step(codes, step, column, table, of_column, store);
      }
    }
  }
}

}  // namespace
}  // namespace hetero
