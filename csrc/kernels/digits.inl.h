// Products with codes that stand for whole numbers (Digits in formats/format.h), over Bytes.
//
// Rows are made whole numbers of 15 bits with a unit for every 32 values of K (whole_rows.h). Bytes
// are multiplied with bytes, two products for a weight, or where their sums would not fit, 16 bits:
//   y = sum over slabs of scale * unit * (sum over the slab of x * (digit - middle))
// and with minima + minimum * (sum of x). The inner sum is of integers: it is exact, in any order.
// Slabs follow each other in ascending K, with fused multiply-adds. Nothing depends on the number
// of rows.
#pragma once

#include "kernels/by_rows.inl.h"
#include "kernels/decode.inl.h"
#include "kernels/gemm.inl.h"

namespace hetero {
namespace {

// All is over a parameter B, which is Bytes: kernels that have none (B::kTogether is 0) compile no
// bodies.

// Fetches what lies behind the word of a vector of columns that is being multiplied: one line at a
// time, for what comes from memory holds the buffers that loads need.
template <class B>
[[gnu::always_inline]] inline void fetch_word(const std::byte* ahead, int word) {
  constexpr int kBytes = sizeof(typename B::I), kLine = 64;
  if (word * kBytes % kLine == 0) Codes::prefetch(ahead + word * kBytes);
}

// The sum over a slab of a vector of columns, in whole numbers: of codes of four bits.
template <class B, bool kPlain>
struct FourBits {
  static constexpr bool kPlainScales = kPlain;
  static constexpr int kWords = kPanel / 8;

  template <int kRows>
  [[gnu::always_inline]] static inline void sum(const typename B::Row* a, const std::byte* codes,
                                                const std::byte* ahead, const typename B::I& table,
                                                typename B::I (&sums)[kRows]) {
    constexpr int kSteps = B::template kSteps<kPlain>;
    for (int first = 0; first < kWords; first += kSteps) {
      typename B::I high[kRows], low[kRows];
      for (int row = 0; row < kRows; ++row) high[row] = low[row] = B::zero();
#pragma GCC unroll 4
      for (int word = first; word < first + kSteps; ++word) {
        const typename B::I eight = B::load(codes + word * kPanel * sizeof(uint32_t));
        fetch_word<B>(ahead, word);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          typename B::I digits = odd != 0 ? B::odd(eight) : B::even(eight);
          if (!kPlain) digits = B::pick(table, digits);
#pragma GCC unroll 12
          for (int row = 0; row < kRows; ++row) {
            const int8_t* x = a[row].parts[word] + 4 * odd;
            high[row] = B::dot(high[row], digits, x);
            low[row] = B::dot(low[row], digits, x + 8);
          }
        }
      }
      for (int row = 0; row < kRows; ++row) {
        const typename B::I whole = B::whole(high[row], low[row]);
        sums[row] = first == 0 ? whole : B::add(sums[row], whole);
      }
    }
  }
};

// The same of codes of eight bits.
template <class B>
struct EightBits {
  static constexpr bool kPlainScales = true;
  static constexpr int kWords = kPanel / 4;

  template <int kRows>
  [[gnu::always_inline]] static inline void sum(const typename B::Row* a, const std::byte* codes,
                                                const std::byte* ahead, const typename B::I&,
                                                typename B::I (&sums)[kRows]) {
    typename B::I first[kRows], second[kRows];
    for (int row = 0; row < kRows; ++row) first[row] = second[row] = B::zero();
#pragma GCC unroll 8
    for (int word = 0; word < kWords; ++word) {
      const typename B::I four = B::load(codes + word * kPanel * sizeof(uint32_t));
      fetch_word<B>(ahead, word);
      const typename B::I left = B::left_digits(four), right = B::right_digits(four);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const int8_t* x = a[row].parts[word / 2] + word % 2 * 4;
        first[row] = B::dot_wide(first[row], left, x);
        second[row] = B::dot_wide(second[row], right, x + 8);
      }
    }
    for (int row = 0; row < kRows; ++row) sums[row] = B::whole_wide(first[row], second[row]);
  }
};

template <class B, class Sums, bool kMin>
struct DigitProduct {
  const Format& format;
  const std::byte* panel;
  int k_pad;

  // C[kRows][32] = rows times the panel. `step` is from one slab of a row to the next.
  template <int kRows>
  [[gnu::noinline]] void multiply(const typename B::Row* a, int step, float* c, int ldc) const {
    constexpr int kVectors = kPanel / V::kLanes;
    V::F totals[kRows][kVectors];
    for (auto& row : totals) {
      for (auto& total : row) total = V::zero();
    }
    const Scale kind = Sums::kPlainScales ? format.scale : Scale::kE8m0;
    const typename B::I table = B::table(format.digits->digit);
    Walk walk(format, panel, k_pad, 0);
    for (int k = 0; k < k_pad; k += kPanel, a += step, walk.next()) {
#pragma GCC unroll 1
      for (int i = 0; i < kVectors; ++i) {
        const int column = i * V::kLanes;
        const std::byte* ahead = walk.codes() + kAhead + i * Sums::kWords * sizeof(typename B::I);
        typename B::I sums[kRows];
        // Else GCC broadcasts all numbers of the rows once, for all vectors, into the stack.
        __asm__("" : "+r"(a));
        Sums::sum(a, walk.codes() + column * sizeof(uint32_t), ahead, table, sums);
        const V::F scale = load_scale(kind, walk.scales(), column);
        const V::F min =
            kMin ? load_scale(kind, walk.scales() + scale_bytes(format), column) : V::zero();
        for (int row = 0; row < kRows; ++row) {
          V::F total = totals[row][i];
          if (kMin) total = V::fma(min, V::set1(a[row].sum), total);
          totals[row][i] = V::fma(B::number(sums[row], a[row].shift),
                                  V::mul(scale, V::set1(a[row].unit)), total);
        }
      }
      // The scales that may follow.
      Codes::prefetch(walk.codes() + kAhead + slab_bytes(format));
    }
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kVectors; ++i) V::store(c + row * ldc + i * V::kLanes, totals[row][i]);
    }
  }
};
inline bool has_digits(const Format& format) {
  return Bytes::kTogether > 0 && format.digits != nullptr;
}

// body(product) with the DigitProduct of `format`.
template <class B, class Body>
inline void by_digits(const Format& format, const std::byte* panel, int k_pad, const Body& body) {
  const auto with = [&](auto sums) {
    using Sums = decltype(sums);
    if (format.has_min) return body(DigitProduct<B, Sums, true>{format, panel, k_pad});
    body(DigitProduct<B, Sums, false>{format, panel, k_pad});
  };
  if (format.code == Code::kInt8) return with(EightBits<B>());
  if (format.digits->plain) return with(FourBits<B, true>());
  body(DigitProduct<B, FourBits<B, false>, false>{format, panel, k_pad});
}

// Rows are packed in the tile's blocks, as they are for bf16 panels: [block][slab][row].
template <class B>
inline size_t digit_rows_bytes(int rows, int k_pad) {
  if constexpr (B::kTogether > 0) return sizeof(typename B::Row) * rows * (k_pad / kPanel);
  return 0;
}

template <class B>
inline void pack_digit_rows(const Format& format, const uint16_t* const* row_ptrs, int rows, int k,
                            int k_pad, int block, void* dst) {
  if constexpr (B::kTogether > 0) {
    const auto make = format.code == Code::kInt8 ? &B::make_wide_row : &B::make_row;
    auto* to = static_cast<typename B::Row*>(dst);
    int count = Tile::block_rows(rows);
    for (; block > 0; --block) {
      to += static_cast<ptrdiff_t>(count) * (k_pad / kPanel);
      row_ptrs += count;
      rows -= count;
      count = Tile::block_rows(rows);
    }
    for (int row = 0; row < count; ++row) {
      for (int first = 0; first < k_pad; first += kPanel) {
        auto* slab = to + static_cast<ptrdiff_t>(first / kPanel) * count + row;
        if (first + kPanel <= k) {
          make(row_ptrs[row] + first, *format.digits, slab);
          continue;
        }
        uint16_t padded[kPanel] = {};
        memcpy(padded, row_ptrs[row] + first, sizeof(uint16_t) * (k - first));
        make(padded, *format.digits, slab);
      }
    }
  }
}

template <class B>
inline void multiply_digits(const void* a, int rows, int k_pad, const Format& format,
                            const std::byte* panel, float* c, int ldc) {
  if constexpr (B::kTogether > 0) {
    const auto* from = static_cast<const typename B::Row*>(a);
    by_digits<B>(format, panel, k_pad, [&](const auto& product) {
      for (int left = rows; left > 0;) {
        const int block = Tile::block_rows(left);
        for (int first = 0, count; first < block; first += count) {
          const int rest = block - first;
          count = ceil_div(rest, ceil_div(rest, B::kTogether));
          by_rows<B::kTogether>(count, [&](auto number) {
            product.template multiply<decltype(number)::value>(from + first, block, c, ldc);
          });
          c += static_cast<ptrdiff_t>(count) * ldc;
        }
        from += static_cast<ptrdiff_t>(block) * (k_pad / kPanel);
        left -= block;
      }
    });
  }
}

}  // namespace
}  // namespace hetero
