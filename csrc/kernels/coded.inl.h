// Products with coded panels: weights are decoded in pieces that stay in the first-level cache, or
// straight into registers when there are few rows. The sums run in the order of gemm either way.
#pragma once

#include "kernels/by_rows.inl.h"
#include "kernels/decode.inl.h"
#include "kernels/gemm.inl.h"
#include "kernels/pack.inl.h"

namespace hetero {
namespace {

// C[kRows][32] from fp32 rows [k_pad][kRows]: the chains of fused multiply-adds of the fp32 tiles.
template <class Decoder, int kRows>
inline void multiply_decoding(const float* a, int k_pad, const Format& format,
                              const std::byte* panel, float* c, int ldc) {
  const Codes::Table table = Codes::table(format.table != nullptr ? format.table : kNoTable);
  for (int column = 0; column < kPanel; column += kSpan) {
    V::F sums[kRows][2];
    for (int row = 0; row < kRows; ++row) sums[row][0] = sums[row][1] = V::zero();
    const float* values = a;
    for (int k = 0; k < k_pad; k += kPanel) {
      const std::byte* codes = panel + slab_bytes(format) * (k / kPanel);
      for (size_t byte = 0; column == 0 && byte < slab_bytes(format); byte += 64) {
        Codes::prefetch(codes + byte + kAhead);
      }
      const Scales scales = load_scales(format, panel + scales_at(format, k_pad, k), column);
      const auto add = [&](const V::F* even, const V::F* odd) {
        for (int parity = 0; parity < 2; ++parity, values += kRows) {
          const V::F* rough = parity == 0 ? even : odd;
          const V::F left = Decoder::kRough ? Codes::truncate(rough[0]) : rough[0];
          const V::F right = Decoder::kRough ? Codes::truncate(rough[1]) : rough[1];
          for (int row = 0; row < kRows; ++row) {
            const V::F value = V::set1(values[row]);
            sums[row][0] = V::fma(value, left, sums[row][0]);
            sums[row][1] = V::fma(value, right, sums[row][1]);
          }
        }
      };
      for (int step = 0; step < kPanel; step += Decoder::kStep) {
        Decoder::step(codes, step, column, table, scales, add);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      V::store(c + row * ldc + column, sums[row][0]);
      V::store(c + row * ldc + column + V::kLanes, sums[row][1]);
    }
  }
}

// Rows times a panel that is decoded piece by piece into the first-level cache.
template <class Decoder>
inline void multiply_pieces(const void* a, int rows, int k_pad, const Format& format,
                            const std::byte* panel, uint16_t* scratch, float* c, int ldc) {
  const int piece = Tile::kInPieces ? kPiece : k_pad;
  for (int first = 0; first < k_pad; first += piece) {
    const int count = k_pad - first < piece ? k_pad - first : piece;
    decode_slabs<Decoder>(format, panel, k_pad, first, count, scratch);
    const char* from = static_cast<const char*>(a);
    float* to = c;
    for (int left = rows; left > 0;) {
      const int block = Tile::block_rows(left);
      Tile::multiply(block, from + Tile::block_bytes(block, first), count, scratch,
                     {reinterpret_cast<const char*>(scratch), 0}, to, ldc, first > 0);
      from += Tile::block_bytes(block, k_pad);
      to += static_cast<ptrdiff_t>(block) * ldc;
      left -= block;
    }
  }
}

void gemm_coded(const void* a, int rows, int k_pad, const Format& format, const std::byte* panel,
                uint16_t* scratch, float* c, int ldc) {
  by_format(format, [&](auto decoder) {
    using Decoder = decltype(decoder);
    if constexpr (Tile::kFloats && V::kLanes > 1) {
      const auto* values = static_cast<const float*>(a);
      // The packed form is one array only as long as the rows are one block.
      const int single = Tile::block_rows(rows) == rows ? rows : 0;
      if (by_rows<8>(single, [&](auto count) {
            multiply_decoding<Decoder, decltype(count)::value>(values, k_pad, format, panel, c,
                                                               ldc);
          })) {
        return;
      }
    }
    multiply_pieces<Decoder>(a, rows, k_pad, format, panel, scratch, c, ldc);
  });
}

void decode(const Format& format, const std::byte* panel, int k_pad, uint16_t* out) {
  by_format(format, [&](auto decoder) {
    decode_slabs<decltype(decoder)>(format, panel, k_pad, 0, k_pad, out);
  });
}

void repair_coded(const Format& format, const std::byte* packed, int num_panels, int k_pad,
                  int k_block, uint16_t* panel) {
  by_format(format, [&](auto decoder) {
    alignas(64) uint16_t square[kPanel * kPanel];
    for (int p = 0; p < num_panels; ++p, packed += panel_bytes(format, k_pad)) {
      decode_slabs<decltype(decoder)>(format, packed, k_pad, k_block * kPanel, kPanel, square);
      repair_square(square, panel + static_cast<ptrdiff_t>(p) * kPanel * kPanel);
    }
  });
}

}  // namespace
}  // namespace hetero
