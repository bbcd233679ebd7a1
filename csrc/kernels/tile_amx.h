// The AMX micro-kernel: up to 32 rows by 32 columns, two by two tiles of 16 by 16.
//
// Written over Amx: the instructions (amx_native.h) or plain C++ (amx_emulated.h). Include one of
// them first. Rows are padded with zeros to 16: the product of one row costs as much as that of 16,
// but its time goes into reading the weights, and so one row has the same bits as in a full tile.
#pragma once

#include <cstring>

#include "base/dtype.h"
#include "kernels/fetch.h"
#include "kernels/kernel.h"

namespace hetero {
namespace {

struct Tile {
  static constexpr int kTileRows = 16;
  static constexpr int kMaxRows = 2 * kTileRows;

  static constexpr bool kFloats = false;
  static constexpr bool kInPieces = false;  // two tiles of rows lie k_pad apart

  static void enter() { Amx::configure(); }
  static void leave() { Amx::release(); }

  static int block_rows(int rows_left) { return rows_left < kMaxRows ? rows_left : kMaxRows; }
  static size_t block_bytes(int rows, int k_pad) {
    return sizeof(uint16_t) * round_up(rows, kTileRows) * k_pad;
  }

  // [tile][k_pad/32][16 rows][32]: every tile is 1 KiB of adjacent memory.
  static void pack(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
    const int padded = round_up(rows, kTileRows);
    for (int row = 0; row < padded; ++row) {
      uint16_t* to = static_cast<uint16_t*>(dst) +
                     static_cast<ptrdiff_t>(row / kTileRows) * kTileRows * k_pad +
                     row % kTileRows * kPanel;
      for (int i = 0; i < k_pad; i += kPanel, to += kTileRows * kPanel) {
        const int left = row < rows ? k - i : 0;
        const int count = left < 0 ? 0 : left < kPanel ? left : kPanel;
        if (count > 0) std::memcpy(to, row_ptrs[row] + i, sizeof(uint16_t) * count);
        if (count < kPanel) std::memset(to + count, 0, sizeof(uint16_t) * (kPanel - count));
      }
    }
  }

  static void multiply(int rows, const void* a, int k_pad, const uint16_t* panel, Fetch, float* c,
                       int ldc, bool accumulate) {
    const uint16_t* from = static_cast<const uint16_t*>(a);
    if (rows <= kTileRows) {
      multiply_tiles<1>(rows, from, k_pad, panel, c, ldc, accumulate);
    } else {
      multiply_tiles<2>(rows, from, k_pad, panel, c, ldc, accumulate);
    }
  }

 private:
  // Tiles: 0 to 3 sums (row of tiles * 2 + column), 4 and 5 rows, 6 and 7 columns.
  template <int kTiles>
  static void multiply_tiles(int rows, const uint16_t* a, int k_pad, const uint16_t* panel,
                             float* c, int ldc, bool accumulate) {
    // The last tile of rows may stand over the end of c: then it goes through memory of its own.
    const int last_rows = rows - (kTiles - 1) * kTileRows;
    alignas(64) float own[kTileRows * kPanel];
    float* last = c + static_cast<ptrdiff_t>(kTiles - 1) * kTileRows * ldc;
    const bool partial = last_rows < kTileRows;
    if (partial && accumulate) {
      std::memset(own, 0, sizeof(own));
      copy_rows(last, ldc, own, kPanel, last_rows);
    }
    start<0>(kTiles > 1 || !partial ? c : own, kTiles > 1 || !partial ? ldc : kPanel, accumulate);
    if (kTiles > 1) start<2>(partial ? own : last, partial ? kPanel : ldc, accumulate);

    const ptrdiff_t second = static_cast<ptrdiff_t>(kTileRows) * k_pad;
    constexpr int64_t kRowBytes = sizeof(uint16_t) * kPanel, kPairBytes = 2 * kRowBytes;
    for (int i = 0; i < k_pad; i += kPanel, a += kTileRows * kPanel, panel += kPanel * kPanel) {
      Amx::load<6>(panel, kPairBytes);
      Amx::load<7>(panel + kPanel, kPairBytes);
      Amx::load<4>(a, kRowBytes);
      Amx::dot<0, 4, 6>();
      Amx::dot<1, 4, 7>();
      if (kTiles > 1) {
        Amx::load<5>(a + second, kRowBytes);
        Amx::dot<2, 5, 6>();
        Amx::dot<3, 5, 7>();
      }
    }

    finish<0>(kTiles > 1 || !partial ? c : own, kTiles > 1 || !partial ? ldc : kPanel);
    if (kTiles > 1) finish<2>(partial ? own : last, partial ? kPanel : ldc);
    if (partial) copy_rows(own, kPanel, last, ldc, last_rows);
  }

  template <int kFirst>
  static void start(const float* c, int ld, bool accumulate) {
    if (accumulate) {
      Amx::load<kFirst>(c, sizeof(float) * ld);
      Amx::load<kFirst + 1>(c + 16, sizeof(float) * ld);
    } else {
      Amx::zero<kFirst>();
      Amx::zero<kFirst + 1>();
    }
  }
  template <int kFirst>
  static void finish(float* c, int ld) {
    Amx::store<kFirst>(c, sizeof(float) * ld);
    Amx::store<kFirst + 1>(c + 16, sizeof(float) * ld);
  }
  static void copy_rows(const float* from, int ld_from, float* to, int ld_to, int rows) {
    for (int row = 0; row < rows; ++row) {
      std::memcpy(to + static_cast<ptrdiff_t>(row) * ld_to,
                  from + static_cast<ptrdiff_t>(row) * ld_from, sizeof(float) * kPanel);
    }
  }
};

}  // namespace
}  // namespace hetero
