// Re-pairing of coded panels whose codes lie in words: codes are turned before they become weights
// of four times their size, or twice.
#pragma once

#include "kernels/turned.inl.h"
#include "kernels/weigh.inl.h"

namespace hetero {
namespace {

// The codes of a slab, column by column: of 16 bytes each, or of 16 for every half of K.
class TurnedSlab {
 public:
  static constexpr int kBytes = 16, kWords = kBytes / 4;

  void turn(Code code, const std::byte* slab) {
    const int halves = kPanel / codes_per_word(code) / kWords;
    for (int half = 0; half < halves; ++half) {
      for (int first = 0; first < kPanel; first += Turn::kSize) {
        Turn::I words[kWords];
        for (int i = 0; i < kWords; ++i) {
          const int at = (half * kWords + i) * kPanel + first;
          words[i] = Turn::load(slab + at * sizeof(uint32_t));
          // From the number plus 128 to the number.
          if (code == Code::kInt8) words[i] = Turn::flip(words[i], 0x80808080u);
        }
        Turn::fours(words);
        for (int i = 0; i < kWords; ++i) {
          Turn::store(codes_[half] + kBytes * first + sizeof(Turn::I) * i, words[i]);
        }
      }
    }
  }

  const std::byte* column(int index, int half) const {
    const int group = index % Turn::kSize;
    return codes_[half] + kBytes * (index - group + group % 4 * (Turn::kSize / 4) + group / 4);
  }

 private:
  alignas(64) std::byte codes_[2][kPanel * kBytes];
};

// A column of a slab: weights of V::kLanes values of K from k on.
template <Code kCode, class Weigher>
class TurnedColumn;

template <class Weigher>
class TurnedColumn<Code::kInt8, Weigher> {
 public:
  TurnedColumn(const TurnedSlab& slab, int column, const Scales& scales, const float*)
      : codes_{slab.column(column, 0), slab.column(column, 1)}, scales_(scales) {}

  V::F at(int k) const {
    const std::byte* from = codes_[k / TurnedSlab::kBytes] + k % TurnedSlab::kBytes;
    return Weigher::weigh(Codes::from_int8(from), scales_, 0);
  }

 private:
  const std::byte* codes_[2];
  const Scales& scales_;
};

// Sixteen weights are made, of which codes pick theirs.
template <class Weigher>
class TurnedColumn<Code::kTable4, Weigher> {
 public:
  TurnedColumn(const TurnedSlab& slab, int column, const Scales& scales, const float* table)
      : codes_(slab.column(column, 0)) {
    table_ = Codes::table(table, weights_, [&](V::F v) { return Weigher::weigh(v, scales, 0); });
  }

  V::F at(int k) const { return Codes::pick(Codes::nibbles(codes_ + k / 2, k % 2), table_); }

 private:
  const std::byte* codes_;
  float weights_[16];  // where the table is no register
  Codes::Table table_;
};

// Scales and minima of a slab, a number for each column.
struct SlabScales {
  alignas(64) float scale[kPanel], min[kPanel];

  SlabScales(const Format& format, const std::byte* from) {
    for (int column = 0; column < kPanel; column += kSpan) {
      const Scales own = load_scales(format, from, column);
      for (int i = 0; i < 2; ++i) {
        V::store(scale + column + i * V::kLanes, own.scale[i]);
        V::store(min + column + i * V::kLanes, own.min[i]);
      }
    }
  }
  Scales of(int column) const { return {{V::set1(scale[column])}, {V::set1(min[column])}}; }
};

template <Code kCode, class Weigher>
inline void repair_words(const Format& format, const std::byte* packed, int num_panels, int k_pad,
                         int k_block, uint16_t* panel) {
  const auto step = static_cast<ptrdiff_t>(panel_bytes(format, k_pad));
  const std::byte* codes = packed + codes_at(format, k_block * kPanel);
  const std::byte* scales = packed + scales_at(format, k_pad, k_block * kPanel);
  const float* table = format.table != nullptr ? format.table : kNoTable;
  TurnedSlab slab;
  for (int p = 0; p < num_panels; ++p, codes += step, scales += step) {
    for (size_t byte = 0; byte < slab_bytes(format); byte += 64) {
      Codes::prefetch(codes + 2 * step + byte);
    }
    Codes::prefetch(scales + 2 * step);
    slab.turn(kCode, codes);
    const SlabScales own(format, scales);
    for (int column = 0; column < kPanel; column += 2, panel += 2 * kPanel) {
      const Scales pair[2] = {own.of(column), own.of(column + 1)};
      const TurnedColumn<kCode, Weigher> even(slab, column, pair[0], table);
      const TurnedColumn<kCode, Weigher> odd(slab, column + 1, pair[1], table);
      for (int k = 0; k < kPanel; k += V::kLanes) {
        Codes::store_pairs(panel + 2 * k, even.at(k), odd.at(k));
      }
    }
  }
}

}  // namespace
}  // namespace hetero
