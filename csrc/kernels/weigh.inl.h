// From codes to bf16 weights: what the kernels that multiply bf16 read, and everything backward.
#pragma once

#include "kernels/decode.inl.h"
#include "kernels/kquant.inl.h"

namespace hetero {
namespace {

// code * scale (+ minimum), to be truncated to bf16.
template <Rounding kRounding, bool kMin>
struct Weigher {
  static V::F weigh(V::F code, const Scales& scales, int i) {
    const V::F value =
        kMin ? V::fma(code, scales.scale[i], scales.min[i]) : V::mul(code, scales.scale[i]);
    if (kRounding == Rounding::kExact) return value;
    return kRounding == Rounding::kEven ? Codes::bump_even(value) : Codes::bump(value);
  }
};

// body(weigher) with the weigher of `format`.
template <class Body>
inline void by_rounding(const Format& format, const Body& body) {
  if (format.has_min) return body(Weigher<Rounding::kEven, true>());
  switch (format.rounding) {
    case Rounding::kExact:
      return body(Weigher<Rounding::kExact, false>());
    case Rounding::kNoTies:
      return body(Weigher<Rounding::kNoTies, false>());
    case Rounding::kEven:
      return body(Weigher<Rounding::kEven, false>());
  }
}

// `count` values of K from `first` on (both multiples of 32) of a coded panel -> [count/2][32][2].
// Meanwhile it fetches what lies `ahead` bytes further.
template <class Decoder, class Weigher>
inline void weigh_slabs(const Format& format, const std::byte* panel, int k_pad, int first,
                        int count, ptrdiff_t ahead, uint16_t* out) {
  const Codes::Table table = table_of(format);
  Walk walk(format, panel, k_pad, first);
  for (int k = 0; k < count; k += kPanel, walk.next(), out += kPanel * kPanel) {
    for (int column = 0; column < kPanel; column += kSpan) {
      uint16_t* to = out + 2 * column;
      const Scales of_column = load_scales(format, walk.scales(), column);
      const auto store = [&](const V::F* even, const V::F* odd) {
        for (int i = 0; i < 2; ++i) {
          Codes::store_pairs(to + i * kSpan, Weigher::weigh(even[i], of_column, i),
                             Weigher::weigh(odd[i], of_column, i));
        }
        to += 2 * kPanel;
      };
      for (int step = 0; step < kPanel; step += kStep) {
        if (column == 0) fetch<Decoder>(walk.codes(), step, ahead);
        Decoder::step(walk.codes(), step, column, table, store);
      }
    }
  }
}

// body(weigh) with weigh(panel, first, count, ahead, out): weigh_slabs of `format`.
template <class Body>
inline void by_format(const Format& format, int k_pad, const Body& body) {
  if (format.kquant != KQuant::kNone) return by_kquant(format.kquant, body);
  by_code(format, [&](auto decoder) {
    by_rounding(format, [&](auto weigher) {
      body([&](const std::byte* panel, int first, int count, ptrdiff_t ahead, uint16_t* out) {
        weigh_slabs<decltype(decoder), decltype(weigher)>(format, panel, k_pad, first, count, ahead,
                                                          out);
      });
    });
  });
}

}  // namespace
}  // namespace hetero
