// From codes to numbers, written over Codes (codes_<isa>.h): one decoder for each kind of code.
#pragma once

#include "formats/format.h"
#include "kernels/sweep.inl.h"

namespace hetero {
namespace {

// Two vectors of columns are decoded at a time.
constexpr int kSpan = 2 * V::kLanes;
constexpr ptrdiff_t kAhead = 8192;  // bytes that are fetched ahead where panels are read in order
const float kNoTable[16] = {};

inline Codes::Table table_of(const Format& format) {
  return Codes::table(format.table != nullptr ? format.table : kNoTable);
}

// Goes through the slabs of a panel.
class Walk {
 public:
  Walk(const Format& format, const std::byte* panel, int k_pad, int first)
      : group_(format.group),
        run_(run_values(format)),
        slab_bytes_(slab_bytes(format)),
        group_bytes_(group_bytes(format)),
        run_scale_bytes_(run_scale_bytes(format)),
        k_pad_(k_pad),
        k_(first),
        codes_(panel + codes_at(format, first)),
        scales_(panel + scales_at(format, k_pad, first)) {}

  const std::byte* codes() const { return codes_; }
  const std::byte* scales() const { return scales_; }

  void next() {
    k_ += kPanel;
    codes_ += slab_bytes_;
    // Groups and runs are powers of two.
    if ((k_ & (run_ - 1)) == 0) {
      codes_ += run_scale_bytes_;
      const int values = k_pad_ - k_ < run_ ? k_pad_ - k_ : run_;
      scales_ = codes_ + slab_bytes_ * (values / kPanel);
    } else if ((k_ & (group_ - 1)) == 0) {
      scales_ += group_bytes_;
    }
  }

 private:
  int group_, run_;
  size_t slab_bytes_, group_bytes_, run_scale_bytes_;
  int k_pad_, k_;
  const std::byte* codes_;
  const std::byte* scales_;
};

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

// Decoders: step(codes, k, column, table, emit) calls emit(even, odd) for every pair of the kStep
// values of K from k on, with two vectors of codes each, as numbers. `codes` is a slab.
constexpr int kStep = 8;

template <Code kCode>
struct Decoder;

template <>
struct Decoder<Code::kFp8> {
  static constexpr int kSlabBytes = 1024;

  template <class Emit>
  static void step(const std::byte* codes, int k, int column, const Codes::Table&, Emit& emit) {
#pragma GCC unroll 4
    for (int pair = k / 2; pair < k / 2 + kStep / 2; ++pair) {
      V::F numbers[2][2];
      for (int odd = 0; odd < 2; ++odd) {
        for (int i = 0; i < 2; ++i) {
          const std::byte* from = codes + (2 * pair + odd) * kPanel + column + i * V::kLanes;
          numbers[odd][i] = Codes::from_e4m3(from);
        }
      }
      emit(numbers[0], numbers[1]);
    }
  }
};

// Read some bytes further on, a word has its next code in the lowest bits without a shift. What
// comes into its highest bits is never looked at.
template <>
struct Decoder<Code::kInt8> {
  static constexpr int kSlabBytes = 1024;

  template <class Emit>
  static void step(const std::byte* codes, int k, int column, const Codes::Table&, Emit& emit) {
    codes += k * kPanel + 4 * column;
#pragma GCC unroll 4
    for (int pair = 0; pair < kStep / 2; ++pair) {
      V::F numbers[2][2];
      for (int odd = 0; odd < 2; ++odd) {
        for (int i = 0; i < 2; ++i) {
          const int byte = pair % 2 * 2 + odd, word = pair / 2 * kPanel + i * V::kLanes;
          numbers[odd][i] = Codes::from_digit(Codes::load_words(codes + 4 * word + byte));
        }
      }
      emit(numbers[0], numbers[1]);
    }
  }
};

template <>
struct Decoder<Code::kTable4> {
  static constexpr int kSlabBytes = 512;

  template <class Emit>
  static void step(const std::byte* codes, int k, int column, const Codes::Table& table,
                   Emit& emit) {
    codes += (k / kStep * kPanel + column) * sizeof(uint32_t);
#pragma GCC unroll 4
    for (int pair = 0; pair < kStep / 2; ++pair) {
      V::F even[2], odd[2];
      for (int i = 0; i < 2; ++i) {
        const auto word = Codes::load_words(codes + i * V::kLanes * sizeof(uint32_t) + pair);
        even[i] = Codes::pick(word, table);
        odd[i] = Codes::pick(Codes::right<4>(word), table);
      }
      emit(even, odd);
    }
  }
};

// Fetches what lies `ahead` bytes behind one step of a slab, and behind the scales that may follow
// the slab. Always inline: GCC takes a function that only fetches for one without effects, and
// drops its calls. Where a slab is gone through kParts times, each fetches its part.
template <class Decoder, int kParts = 1>
[[gnu::always_inline]] inline void fetch(const std::byte* codes, int step, ptrdiff_t ahead,
                                         int part = 0) {
  constexpr int kBytes = Decoder::kSlabBytes / (kPanel / kStep);
  const std::byte* from = codes + ahead + step / kStep * kBytes;
#pragma GCC unroll 4
  for (int byte = 64 * part; byte < kBytes; byte += 64 * kParts) Codes::prefetch(from + byte);
  if (part == 0 && step + kStep == kPanel) Codes::prefetch(from + kBytes);
}

// body(decoder) with the decoder of `format`.
template <class Body>
inline void by_code(const Format& format, const Body& body) {
  switch (format.code) {
    case Code::kFp8:
      return body(Decoder<Code::kFp8>());
    case Code::kInt8:
      return body(Decoder<Code::kInt8>());
    case Code::kTable4:
      return body(Decoder<Code::kTable4>());
  }
}

}  // namespace
}  // namespace hetero
