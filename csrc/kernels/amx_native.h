// Amx: the instructions of the AMX tile. Tile numbers are template arguments, so the compiler's own
// intrinsics, macros that paste the number into the text, do not serve.
#pragma once

#include <stdint.h>

namespace hetero {
namespace {

struct Amx {
  // All eight tiles: 16 rows of 64 bytes.
  static void configure() {
    struct alignas(64) Config {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof(Config) == 64, "the format of LDTILECFG");
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  // Gives the tile state up: the thread switches faster without it.
  static void release() { asm volatile("tilerelease" ::); }

  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
  }
  // c += a . b, a 16 rows of 16 pairs, b 16 pairs of rows by 16 columns
  template <int kC, int kA, int kB>
  static void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace hetero
