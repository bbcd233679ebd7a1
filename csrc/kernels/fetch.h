// What a micro-kernel asks the memory for while it computes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernel.h"

namespace hetero {
namespace {

// Two cache lines at `from` for every pair of K, then `step` bytes on: into the second-level cache,
// for the first level is full of the panel and the rows.
struct Fetch {
  const char* from;
  ptrdiff_t step;
};

// For block `block` of `blocks` that are multiplied with one panel in turn. A single block reads
// its panel from afar, so it fetches 4 KiB ahead. Of several, each fetches its share of the panel
// that follows in memory, mostly the next one, so that reading goes on while they all compute.
inline Fetch fetch_of(const uint16_t* panel, int k_pad, int block, int blocks) {
  const auto* bytes = reinterpret_cast<const char*>(panel);
  const ptrdiff_t pair = 2 * sizeof(uint16_t) * kPanel;
  if (blocks == 1) return {bytes + 4096, pair};
  const ptrdiff_t size = pair * (k_pad / 2);
  return {bytes + size + size * block / blocks, pair / blocks};
}

}  // namespace
}  // namespace hetero
