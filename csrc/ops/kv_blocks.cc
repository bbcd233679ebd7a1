#include "ops/kv_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

#include "base/dtype.h"

namespace hetero {
namespace {

constexpr int kPairs = kKvBlock / 2;

// One pair of dimensions of a row; the second is 0 when the row ends before it.
uint32_t load_pair(const uint16_t* row, int pair, int dim) {
  if (2 * pair + 1 < dim) {
    uint32_t two;
    std::memcpy(&two, row + 2 * pair, sizeof(two));
    return two;
  }
  return 2 * pair < dim ? row[2 * pair] : 0;
}

void store_pair(uint16_t* at, uint32_t two) { std::memcpy(at, &two, sizeof(two)); }

using BlockRows = std::array<int32_t, kKvBlock>;

struct BlockHash {
  size_t operator()(const BlockRows& rows) const {
    uint64_t hash = 1469598103934665603u;
    for (int32_t row : rows) hash = (hash ^ static_cast<uint32_t>(row)) * 1099511628211u;
    return hash;
  }
};

}  // namespace

void pack_token_panels(const KernelSet& kernels, const uint16_t* const* rows, int count, int dim,
                       uint16_t* panels) {
  for (int first = 0; first < dim; first += kPanel) {
    kernels.pack_rows(rows, count, dim, first, panels + first * kKvBlock);
  }
}

int KvPlan::count(int block) const {
  const int32_t* first = rows.data() + static_cast<size_t>(block) * kKvBlock;
  return static_cast<int>(std::find(first, first + kKvBlock, -1) - first);
}

KvPlan plan_blocks(const int32_t* kv_rows, const int32_t* kv_start, int num_segments) {
  KvPlan plan;
  std::unordered_map<BlockRows, int32_t, BlockHash> known;
  plan.starts.push_back(0);
  for (int s = 0; s < num_segments; ++s) {
    for (int32_t first = kv_start[s]; first < kv_start[s + 1]; first += kKvBlock) {
      BlockRows rows;
      rows.fill(-1);
      std::copy(kv_rows + first, kv_rows + std::min(first + kKvBlock, kv_start[s + 1]),
                rows.begin());
      const auto [it, added] = known.try_emplace(rows, plan.num_blocks());
      if (added) plan.rows.insert(plan.rows.end(), rows.begin(), rows.end());
      plan.tables.push_back(it->second);
    }
    plan.starts.push_back(static_cast<int64_t>(plan.tables.size()));
  }
  return plan;
}

void pack_blocks(Context& context, const KvPlan& plan, HeadRows x, int heads, int dim,
                 bool token_panels, uint16_t* out) {
  const size_t size = static_cast<size_t>(round_up(dim, kPanel)) * kKvBlock;
  context.parallel(static_cast<int64_t>(plan.num_blocks()) * heads, [&](int64_t task, int) {
    const int block = static_cast<int>(task / heads), head = static_cast<int>(task % heads);
    const uint16_t* rows[kKvBlock];
    const int count = plan.count(block);
    for (int n = 0; n < count; ++n) {
      rows[n] = x.at(plan.rows[static_cast<size_t>(block) * kKvBlock + n], head);
    }
    if (token_panels) {
      pack_token_panels(context.kernels(), rows, count, dim, out + task * size);
    } else {
      context.kernels().pack_columns(rows, count, dim, round_up(dim, kPanel), out + task * size);
    }
  });
}

void write_kv(Context& context, HeadRows k, HeadRows v, const int64_t* slots, int64_t tokens,
              int heads, int dim, int v_dim, uint16_t* k_pool, uint16_t* v_pool) {
  const int64_t k_size = static_cast<int64_t>(round_up(dim, kPanel)) * kKvBlock * heads;
  const int64_t v_size = static_cast<int64_t>(round_up(v_dim, kPanel)) * kKvBlock * heads;
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] % kKvBlock != 0) continue;
    const int64_t block = slots[t] / kKvBlock;
    std::memset(k_pool + block * k_size, 0, k_size * sizeof(uint16_t));
    std::memset(v_pool + block * v_size, 0, v_size * sizeof(uint16_t));
  }
  constexpr int64_t kStep = 16;
  context.parallel((tokens + kStep - 1) / kStep, [&](int64_t task, int) {
    for (int64_t t = task * kStep; t < std::min(tokens, (task + 1) * kStep); ++t) {
      const int64_t block = slots[t] / kKvBlock;
      const int offset = static_cast<int>(slots[t] % kKvBlock);
      for (int head = 0; head < heads; ++head) {
        uint16_t* keys = k_pool + block * k_size + k_size / heads * head;
        const uint16_t* key = k.at(t, head);
        for (int pair = 0; pair < (dim + 1) / 2; ++pair) {
          store_pair(keys + (pair * kKvBlock + offset) * 2, load_pair(key, pair, dim));
        }
        uint16_t* values = v_pool + block * v_size + v_size / heads * head;
        const uint16_t* value = v.at(t, head);
        for (int d = 0; d < v_dim; ++d) {
          const int panel = d / kPanel, column = d % kPanel;
          values[((panel * kPairs + offset / 2) * kPanel + column) * 2 + offset % 2] = value[d];
        }
      }
    }
  });
}

}  // namespace hetero
