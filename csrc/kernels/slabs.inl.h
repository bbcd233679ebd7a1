// Products with coded panels, for the kernels that multiply fp32.
//
// The codes of a slab, 32 values of K, are multiplied as they are; the sum counts scale-fold:
//   y = sum over slabs of scale * (sum over the slab of x * code)
// with fused multiply-adds in ascending K throughout. A weight then costs no rounding and no
// multiplication of its own, and a row no chain longer than a slab, so that the chains of two
// slabs can run side by side. Formats with minima sum x * (code * scale + minimum) in the same
// way, with a scale of one. The order is the same for any number of rows.
#pragma once

#include "kernels/by_rows.inl.h"
#include "kernels/decode.inl.h"
#include "kernels/gemm.inl.h"

namespace hetero {
namespace {

// What a slab's sums are made of: codes, or whole weights.
template <bool kMin>
inline V::F factor(V::F code, const Scales& scales, int i) {
  return kMin ? V::fma(code, scales.scale[i], scales.min[i]) : code;
}
// The total with the sum of a slab.
template <bool kMin>
inline V::F count_in(V::F sum, V::F scale, V::F total) {
  return kMin ? V::add(total, sum) : V::fma(sum, scale, total);
}

// Few rows: straight from the codes. a is [k_pad][kRows].
template <class Decoder, bool kMin, int kRows>
struct FewRows {
  static constexpr int kVectors = kPanel / V::kLanes;

  const Format& format;
  const std::byte* panel;
  int k_pad;
  Codes::Table table;

  // Adds kSlabs slabs to the totals, their sums running side by side.
  template <int kSlabs>
  [[gnu::always_inline]] inline void add_slabs(const float* a, Walk& walk,
                                               V::F (&totals)[kRows][kVectors]) const {
    const std::byte* codes[kSlabs];
    const std::byte* scales[kSlabs];
    for (int slab = 0; slab < kSlabs; ++slab, walk.next()) {
      codes[slab] = walk.codes();
      scales[slab] = walk.scales();
    }
    for (int column = 0; column < kPanel; column += kSpan) {
      add_columns<kSlabs>(a, codes, scales, column, totals);
    }
  }

  [[gnu::noinline]] void multiply(const float* a, float* c, int ldc) const {
    // One or two rows wait for their chains; more have chains enough.
    constexpr int kTogether = kRows <= 2 ? 2 : 1;
    V::F totals[kRows][kVectors];
    for (auto& row : totals) {
      for (auto& total : row) total = V::zero();
    }
    Walk walk(format, panel, k_pad, 0);
    int k = 0;
    for (; k + kTogether * kPanel <= k_pad; k += kTogether * kPanel) {
      add_slabs<kTogether>(a + k * kRows, walk, totals);
    }
    if (k < k_pad) add_slabs<1>(a + k * kRows, walk, totals);
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kVectors; ++i) V::store(c + row * ldc + i * V::kLanes, totals[row][i]);
    }
  }

 private:
  // Of two vectors of columns.
  template <int kSlabs>
  [[gnu::always_inline]] inline void add_columns(const float* a, const std::byte* const* codes,
                                                 const std::byte* const* own, int column,
                                                 V::F (&totals)[kRows][kVectors]) const {
    Scales scales[kSlabs];
    V::F sums[kSlabs][kRows][2];
    for (int slab = 0; slab < kSlabs; ++slab) {
      scales[slab] = load_scales(format, own[slab], column);
      for (int row = 0; row < kRows; ++row) sums[slab][row][0] = sums[slab][row][1] = V::zero();
    }
    for (int step = 0; step < kPanel; step += kStep) {
#pragma GCC unroll 2
      for (int slab = 0; slab < kSlabs; ++slab) {
        const float* values = a + (slab * kPanel + step) * kRows;
        const auto add = [&](const V::F* even, const V::F* odd) {
          for (int parity = 0; parity < 2; ++parity, values += kRows) {
            const V::F* code = parity == 0 ? even : odd;
            const V::F left = factor<kMin>(code[0], scales[slab], 0);
            const V::F right = factor<kMin>(code[1], scales[slab], 1);
            for (int row = 0; row < kRows; ++row) {
              const V::F value = V::set1(values[row]);
              sums[slab][row][0] = V::fma(value, left, sums[slab][row][0]);
              sums[slab][row][1] = V::fma(value, right, sums[slab][row][1]);
            }
          }
        };
        fetch<Decoder, kPanel / kSpan>(codes[slab], step, kAhead, column / kSpan);
        Decoder::step(codes[slab], step, column, table, add);
      }
    }
    for (int slab = 0; slab < kSlabs; ++slab) {
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < 2; ++i) {
          V::F& total = totals[row][column / V::kLanes + i];
          total = count_in<kMin>(sums[slab][row][i], scales[slab].scale[i], total);
        }
      }
    }
  }
};

// Many rows: a piece of K is decoded for all of them, into the first-level cache.
struct Piece {
  static constexpr int kValues = 128;  // of K: 16 KiB
  static constexpr int kSlabs = kValues / kPanel;

  alignas(64) float numbers[kValues][kPanel];
  alignas(64) float scales[kSlabs][kPanel];

  // `count` values from `first` on.
  template <class Decoder, bool kMin>
  void decode(const Format& format, const std::byte* panel, int k_pad, int first, int count) {
    const Codes::Table table = table_of(format);
    Walk walk(format, panel, k_pad, first);
    for (int k = 0; k < count; k += kPanel, walk.next()) {
      for (int column = 0; column < kPanel; column += kSpan) {
        const Scales own = load_scales(format, walk.scales(), column);
        float* to = numbers[k] + column;
        const auto store = [&](const V::F* even, const V::F* odd) {
          for (int i = 0; i < 2; ++i) {
            V::store(to + i * V::kLanes, factor<kMin>(even[i], own, i));
            V::store(to + kPanel + i * V::kLanes, factor<kMin>(odd[i], own, i));
          }
          to += 2 * kPanel;
        };
        for (int step = 0; step < kPanel; step += kStep) {
          if (column == 0) fetch<Decoder>(walk.codes(), step, kAhead);
          Decoder::step(walk.codes(), step, column, table, store);
        }
        for (int i = 0; i < 2; ++i) {
          V::store(scales[k / kPanel] + column + i * V::kLanes, own.scale[i]);
        }
      }
    }
  }

  // C[kRows][32] (+)= rows [count][kRows] times the piece.
  template <bool kMin, int kRows>
  [[gnu::noinline]] void multiply(const float* a, int count, float* c, int ldc,
                                  bool accumulate) const {
    for (int slab = 0; slab < count / kPanel; ++slab, a += kPanel * kRows) {
      for (int column = 0; column < kPanel; column += kSpan) {
        V::F sums[kRows][2];
        for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = V::zero();
        const float* values = a;
        for (int k = slab * kPanel; k < (slab + 1) * kPanel; ++k, values += kRows) {
          const V::F left = V::load(numbers[k] + column);
          const V::F right = V::load(numbers[k] + column + V::kLanes);
#pragma GCC unroll 12
          for (int row = 0; row < kRows; ++row) {
            const V::F value = V::set1(values[row]);
            sums[row][0] = V::fma(value, left, sums[row][0]);
            sums[row][1] = V::fma(value, right, sums[row][1]);
          }
        }
        for (int row = 0; row < kRows; ++row) {
          for (int i = 0; i < 2; ++i) {
            float* at = c + row * ldc + column + i * V::kLanes;
            const V::F total = accumulate || slab > 0 ? V::load(at) : V::zero();
            V::store(at, count_in<kMin>(sums[row][i],
                                        V::load(scales[slab] + column + i * V::kLanes), total));
          }
        }
      }
    }
  }
};

template <class Decoder, bool kMin>
inline void multiply_slabs(const float* a, int rows, int k_pad, const Format& format,
                           const std::byte* panel, float* c, int ldc) {
  // The packed form is one array only as long as the rows are one block.
  constexpr int kFew = Tile::kMaxRows < 8 ? Tile::kMaxRows : 8;
  const int single = Tile::block_rows(rows) == rows ? rows : 0;
  const auto few = [&](auto count) {
    FewRows<Decoder, kMin, decltype(count)::value>{format, panel, k_pad, table_of(format)}.multiply(
        a, c, ldc);
  };
  if (by_rows<kFew>(single, few)) return;
  Piece piece;
  for (int first = 0; first < k_pad; first += Piece::kValues) {
    const int values = k_pad - first < Piece::kValues ? k_pad - first : Piece::kValues;
    piece.decode<Decoder, kMin>(format, panel, k_pad, first, values);
    const auto* from = reinterpret_cast<const char*>(a);
    float* to = c;
    for (int left = rows; left > 0;) {
      const int block = Tile::block_rows(left);
      const auto* block_rows =
          reinterpret_cast<const float*>(from + Tile::block_bytes(block, first));
      by_rows<Tile::kMaxRows>(block, [&](auto count) {
        piece.multiply<kMin, decltype(count)::value>(block_rows, values, to, ldc, first > 0);
      });
      from += Tile::block_bytes(block, k_pad);
      to += static_cast<ptrdiff_t>(block) * ldc;
      left -= block;
    }
  }
}

}  // namespace
}  // namespace hetero
