// Products with coded panels.
#pragma once

#include "kernels/digits.inl.h"
#include "kernels/pack.inl.h"
#include "kernels/slabs.inl.h"
#include "kernels/turned_codes.inl.h"
#include "kernels/weigh.inl.h"

namespace hetero {
namespace {

// Rows times a panel that is made bf16 piece by piece, in the first-level cache.
inline void multiply_pieces(const void* a, int rows, int k_pad, const Format& format,
                            const std::byte* panel, uint16_t* scratch, float* c, int ldc) {
  constexpr int kPiece = 256;  // values of K: 16 KiB of weights
  const int piece = Tile::kInPieces ? kPiece : k_pad;
  by_format(format, k_pad, [&](const auto& weigh) {
    for (int first = 0; first < k_pad; first += piece) {
      const int count = k_pad - first < piece ? k_pad - first : piece;
      weigh(panel, first, count, kAhead, scratch);
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
  });
}

size_t coded_a_bytes(const Format& format, int rows, int k_pad) {
  if (has_digits(format)) return digit_rows_bytes<Bytes>(rows, k_pad);
  return a_bytes(rows, k_pad);
}

void pack_coded_a_block(const Format& format, const uint16_t* const* row_ptrs, int rows, int k,
                        int k_pad, int block, void* dst) {
  if (has_digits(format)) {
    return pack_digit_rows<Bytes>(format, row_ptrs, rows, k, k_pad, block, dst);
  }
  pack_a_block(row_ptrs, rows, k, k_pad, block, dst);
}

void gemm_coded(const void* a, int rows, int k_pad, const Format& format, const std::byte* panel,
                uint16_t* scratch, float* c, int ldc) {
  if (format.kquant != KQuant::kNone) {
    return multiply_pieces(a, rows, k_pad, format, panel, scratch, c, ldc);
  }
  if (has_digits(format)) return multiply_digits<Bytes>(a, rows, k_pad, format, panel, c, ldc);
  if constexpr (Tile::kFloats && V::kLanes > 1) {
    by_code(format, [&](auto decoder) {
      using Decoder = decltype(decoder);
      const auto* values = static_cast<const float*>(a);
      if (format.has_min) {
        multiply_slabs<Decoder, true>(values, rows, k_pad, format, panel, c, ldc);
      } else {
        multiply_slabs<Decoder, false>(values, rows, k_pad, format, panel, c, ldc);
      }
    });
  } else {
    multiply_pieces(a, rows, k_pad, format, panel, scratch, c, ldc);
  }
}

void decode(const Format& format, const std::byte* panel, int k_pad, uint16_t* out) {
  by_format(format, k_pad, [&](const auto& weigh) { weigh(panel, 0, k_pad, kAhead, out); });
}

void repair_coded(const Format& format, const std::byte* packed, int num_panels, int k_pad,
                  int k_block, uint16_t* panel) {
  if (format.kquant == KQuant::kNone && format.code != Code::kFp8) {
    return by_rounding(format, [&](auto weigher) {
      using Weigher = decltype(weigher);
      const auto repair_as = format.code == Code::kInt8 ? &repair_words<Code::kInt8, Weigher>
                                                        : &repair_words<Code::kTable4, Weigher>;
      repair_as(format, packed, num_panels, k_pad, k_block, panel);
    });
  }
  by_format(format, k_pad, [&](const auto& weigh) {
    alignas(64) uint16_t square[kPanel * kPanel];
    const auto step = static_cast<ptrdiff_t>(panel_bytes(format, k_pad));
    for (int p = 0; p < num_panels; ++p, packed += step) {
      weigh(packed, k_block * kPanel, kPanel, 2 * step, square);
      repair_square(square, panel + static_cast<ptrdiff_t>(p) * kPanel * kPanel);
    }
  });
}

}  // namespace
}  // namespace hetero
