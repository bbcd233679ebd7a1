// Query tiles: the rows of one attention task, and what attention's forward and backward share
// about them.
#pragma once

#include <algorithm>
#include <vector>

#include "base/dtype.h"
#include "ops/attention.h"

namespace hetero {

// Some consecutive queries of one segment; with all query heads of a KV head they are queries *
// group rows.
struct QueryTile {
  int segment = 0;
  int row = 0;  // of the first query on the packed axis
  int queries = 0;
  int position = 0;  // of the first query
  // Blocks that any of its queries sees: first to last, inclusive.
  int first_block(int window) const {
    return window > 0 ? std::max(0, position - window + 1) / kKvBlock : 0;
  }
  int last_block() const { return (position + queries - 1) / kKvBlock; }
};

inline std::vector<QueryTile> query_tiles(const Segments& segments, int queries_per_tile) {
  std::vector<QueryTile> tiles;
  for (int s = 0; s < segments.count; ++s) {
    const int end = segments.q_start[s + 1];
    const int shift = segments.kv_len[s] - end;  // row to position
    for (int row = segments.q_start[s]; row < end; row += queries_per_tile) {
      tiles.push_back({s, row, std::min(queries_per_tile, end - row), row + shift});
    }
  }
  return tiles;
}

// Query i and head g of the group are row i * group + g of a tile.
inline int tile_queries(int group) {
  constexpr int kRows = 48;
  return std::max(1, kRows / group);
}

// Columns of a block that a query at `position` sees.
inline void visible_columns(int position, int window, int block, int32_t* lo, int32_t* hi) {
  const int base = block * kKvBlock;
  *hi = std::clamp(position + 1 - base, 0, kKvBlock);
  *lo = window > 0 ? std::clamp(position - window + 1 - base, 0, kKvBlock) : 0;
}

// Hands out 64-byte aligned pieces of one block of memory; with a null block it only counts.
class Carver {
 public:
  explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}
  template <class T>
  T* take(size_t count) {
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

// One scratch per thread; Scratch is built from a Carver and whatever else it needs.
template <class Scratch, class... Args>
std::vector<Scratch> thread_scratch(Context& context, Op& op, const Args&... args) {
  Carver counter;
  Scratch measure(counter, args...);
  static_cast<void>(measure);
  std::vector<Scratch> all;
  for (int thread = 0; thread < context.num_threads(); ++thread) {
    Carver carver(op.take<std::byte>(counter.used()));
    all.emplace_back(carver, args...);
  }
  return all;
}

}  // namespace hetero
