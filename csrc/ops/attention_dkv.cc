#include "ops/attention_grad.h"

namespace hetero {
namespace {

// 32 queries of one head, as right operands.
struct QueryPanels {
  std::vector<QueryTile> tiles;  // of 32 queries
  std::vector<int> first;        // [segments + 1] first tile of a segment
  size_t stride = 0;             // values per tile and head
  uint16_t* data = nullptr;      // [tile][head of the pass][stride]
};

struct Scratch {
  Scratch(Carver& carver, const AttentionGrad& p)
      : k(carver.take<std::byte>(p.kernels.a_bytes(kKvBlock, p.dim_pad))),
        v(carver.take<std::byte>(p.kernels.a_bytes(kKvBlock, p.v_pad))),
        left(carver.take<std::byte>(p.kernels.a_bytes(kKvBlock, kKvBlock))),
        s(carver.take<float>(kKvBlock * kKvBlock)),
        dp(carver.take<float>(kKvBlock * kKvBlock)),
        p_rows(carver.take<uint16_t>(kKvBlock * kKvBlock)),
        ds_rows(carver.take<uint16_t>(kKvBlock * kKvBlock)) {}
  void *k, *v, *left;  // left operands
  float *s, *dp;
  uint16_t *p_rows, *ds_rows;
};

// The part of a block's gradient that comes from one tile of 32 queries and one head.
void add_key_gradient(const AttentionGrad& p, const QueryTile& tile, int head, int base, int count,
                      const uint16_t* panels, Scratch& s, float* dk, float* dv) {
  const uint16_t* q_dim = panels;
  const uint16_t* dout_dim = q_dim + p.dim_pad * kKvBlock;
  const uint16_t* q_token = dout_dim + p.v_pad * kKvBlock;
  const uint16_t* dout_token = q_token + p.dim_pad * kKvBlock;
  float lse[kKvBlock] = {}, delta[kKvBlock] = {};
  for (int i = 0; i < tile.queries; ++i) {
    const int64_t at = static_cast<int64_t>(tile.row + i) * p.shape.heads + head;
    lse[i] = p.lse[at];
    delta[i] = p.delta[at];
  }
  int32_t lo[kKvBlock], hi[kKvBlock];
  const uint16_t *p_pointers[kKvBlock], *ds_pointers[kKvBlock];
  for (int n = 0; n < kKvBlock; ++n) {
    // Queries at the key's own position and behind it see the key, until the window has passed.
    const int ahead = base + n - tile.position;
    const int end = p.params.window > 0 ? ahead + p.params.window : tile.queries;
    lo[n] = std::clamp(ahead, 0, kKvBlock);
    hi[n] = n < count ? std::clamp(end, 0, tile.queries) : 0;
    p_pointers[n] = s.p_rows + n * kKvBlock;
    ds_pointers[n] = s.ds_rows + n * kKvBlock;
  }
  const Scores scores{kKvBlock, lo, hi, p.params.scale, p.params.softcap};
  p.kernels.gemm(s.k, kKvBlock, p.dim_pad, q_dim, s.s, kKvBlock, false);
  p.kernels.gemm(s.v, kKvBlock, p.v_pad, dout_dim, s.dp, kKvBlock, false);
  p.kernels.attend_backward_keys(scores, s.s, s.dp, lse, delta, s.p_rows, s.ds_rows);
  p.kernels.pack_a(p_pointers, kKvBlock, kKvBlock, kKvBlock, s.left);
  for (int d = 0; d < p.v_pad; d += kPanel) {
    p.kernels.gemm(s.left, kKvBlock, kKvBlock, dout_token + d * kKvBlock, dv + d, p.v_pad, true);
  }
  p.kernels.pack_a(ds_pointers, kKvBlock, kKvBlock, kKvBlock, s.left);
  for (int d = 0; d < p.dim_pad; d += kPanel) {
    p.kernels.gemm(s.left, kKvBlock, kKvBlock, q_token + d * kKvBlock, dk + d, p.dim_pad, true);
  }
}

// Which (segment, index in its table) use a block, in order.
struct BlockUsers {
  explicit BlockUsers(const KvPlan& plan) : users(plan.num_blocks()) {
    for (size_t s = 0; s + 1 < plan.starts.size(); ++s) {
      for (int64_t i = plan.starts[s]; i < plan.starts[s + 1]; ++i) {
        users[plan.tables[i]].push_back(
            {static_cast<int>(s), static_cast<int>(i - plan.starts[s])});
      }
    }
  }
  struct User {
    int segment, index;
  };
  std::vector<std::vector<User>> users;
};

// dk [32][dim_pad] and dv [32][v_pad] of one block and KV head; `head` counts within the pass.
void block_gradient(const AttentionGrad& p, const QueryPanels& panels, const BlockUsers& users,
                    int block, int kv_head, int head, int heads, Scratch& s, float* dk, float* dv) {
  const int count = p.plan.count(block);
  const uint16_t *k_rows[kKvBlock], *v_rows[kKvBlock];
  for (int n = 0; n < kKvBlock; ++n) {
    // Rows behind the end stand in for nothing: their weights are masked to 0.
    const int32_t row = p.plan.rows[static_cast<size_t>(block) * kKvBlock + std::min(n, count - 1)];
    k_rows[n] = p.k.at(row, kv_head);
    v_rows[n] = p.v.at(row, kv_head);
  }
  p.kernels.pack_a(k_rows, kKvBlock, p.shape.dim, p.dim_pad, s.k);
  p.kernels.pack_a(v_rows, kKvBlock, p.shape.v_dim, p.v_pad, s.v);
  std::fill_n(dk, kKvBlock * p.dim_pad, 0.0f);
  std::fill_n(dv, kKvBlock * p.v_pad, 0.0f);
  for (const auto& user : users.users[block]) {
    const int base = user.index * kKvBlock;
    for (int t = panels.first[user.segment]; t < panels.first[user.segment + 1]; ++t) {
      const QueryTile& tile = panels.tiles[t];
      if (tile.last_block() < user.index) continue;
      if (tile.first_block(p.params.window) > user.index) break;
      for (int g = 0; g < p.group; ++g) {
        const size_t at = (static_cast<size_t>(t) * heads + head * p.group + g) * panels.stride;
        add_key_gradient(p, tile, kv_head * p.group + g, base, count, panels.data + at, s, dk, dv);
      }
    }
  }
}

void pack_queries(Context& context, const AttentionGrad& p, QueryPanels& panels, int first_head,
                  int heads) {
  context.parallel(static_cast<int64_t>(panels.tiles.size()) * heads, [&](int64_t task, int) {
    const QueryTile& tile = panels.tiles[task / heads];
    const int head = first_head + static_cast<int>(task % heads);
    uint16_t* to = panels.data + task * panels.stride;
    const uint16_t *q[kKvBlock], *dout[kKvBlock];
    for (int i = 0; i < tile.queries; ++i) {
      q[i] = p.q.at(tile.row + i, head);
      dout[i] = p.dout.at(tile.row + i, head);
    }
    p.kernels.pack_columns(q, tile.queries, p.shape.dim, p.dim_pad, to);
    to += p.dim_pad * kKvBlock;
    p.kernels.pack_columns(dout, tile.queries, p.shape.v_dim, p.v_pad, to);
    to += p.v_pad * kKvBlock;
    pack_token_panels(p.kernels, q, tile.queries, p.shape.dim, to);
    to += p.dim_pad * kKvBlock;
    pack_token_panels(p.kernels, dout, tile.queries, p.shape.v_dim, to);
  });
}

// Where every row of the packed axis stands in the blocks: blocks * 32 + offset, ascending.
struct RowPlaces {
  RowPlaces(const KvPlan& plan, int64_t tokens) : first(tokens + 1), places(plan.rows.size()) {
    for (int32_t row : plan.rows) {
      if (row >= 0) ++first[row + 1];
    }
    for (int64_t row = 0; row < tokens; ++row) first[row + 1] += first[row];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (size_t place = 0; place < plan.rows.size(); ++place) {
      if (plan.rows[place] >= 0) places[next[plan.rows[place]]++] = static_cast<int64_t>(place);
    }
  }
  std::vector<int64_t> first;  // [tokens + 1] into places
  std::vector<int64_t> places;
};

// The row's sum over its places, in fp32, rounded once. from [heads][blocks * 32][pad].
void sum_places(const AttentionGrad& p, const RowPlaces& places, int64_t row, const float* from,
                int pad, int dim, float* sum, uint16_t* to) {
  std::fill_n(sum, pad, 0.0f);
  for (int64_t i = places.first[row]; i < places.first[row + 1]; ++i) {
    p.kernels.add(from + places.places[i] * pad, sum, dim);
  }
  p.kernels.to_bf16(sum, to, dim);
}

}  // namespace

void key_gradients(Context& context, const AttentionGrad& p, uint16_t* dk, uint16_t* dv) {
  Op op(context);
  QueryPanels panels{query_tiles(p.segments, kKvBlock), {0}, 0, nullptr};
  for (size_t t = 0; t < panels.tiles.size(); ++t) {
    panels.first.resize(panels.tiles[t].segment + 1, static_cast<int>(t));
  }
  panels.first.resize(p.segments.count + 1, static_cast<int>(panels.tiles.size()));
  panels.stride = size_t{2} * (p.dim_pad + p.v_pad) * kKvBlock;

  // Packed queries and fp32 gradients exist for a few KV heads at a time: long batches would need
  // gigabytes.
  const size_t positions = p.plan.rows.size();
  const size_t bytes = panels.tiles.size() * p.group * panels.stride * sizeof(uint16_t) +
                       positions * (p.dim_pad + p.v_pad) * sizeof(float);
  const int pass = static_cast<int>(
      std::clamp<size_t>((size_t{256} << 20) / std::max<size_t>(bytes, 1), 1, p.shape.kv_heads));
  panels.data = op.take<uint16_t>(panels.tiles.size() * pass * p.group * panels.stride);
  float* dk_blocks = op.take<float>(positions * pass * p.dim_pad);
  float* dv_blocks = op.take<float>(positions * pass * p.v_pad);
  const size_t pad = std::max(p.dim_pad, p.v_pad);
  float* sums = op.take<float>(pad * context.num_threads());
  std::vector<Scratch> scratch = thread_scratch<Scratch>(context, op, p);
  const BlockUsers users(p.plan);
  const RowPlaces places(p.plan, p.shape.kv_tokens);
  const int num_blocks = p.plan.num_blocks();

  for (int first = 0; first < p.shape.kv_heads; first += pass) {
    const int heads = std::min(pass, p.shape.kv_heads - first);
    pack_queries(context, p, panels, first * p.group, heads * p.group);
    context.parallel(static_cast<int64_t>(num_blocks) * heads, [&](int64_t task, int thread) {
      const int block = static_cast<int>(task % num_blocks);
      const int head = static_cast<int>(task / num_blocks);
      block_gradient(p, panels, users, block, first + head, head, heads * p.group, scratch[thread],
                     dk_blocks + task * kKvBlock * p.dim_pad,
                     dv_blocks + task * kKvBlock * p.v_pad);
    });
    context.parallel(p.shape.kv_tokens, [&](int64_t row, int thread) {
      for (int head = 0; head < heads; ++head) {
        const int64_t at = row * p.shape.kv_heads + first + head;
        float* sum = sums + thread * pad;
        sum_places(p, places, row, dk_blocks + positions * head * p.dim_pad, p.dim_pad, p.shape.dim,
                   sum, dk + at * p.shape.dim);
        sum_places(p, places, row, dv_blocks + positions * head * p.v_pad, p.v_pad, p.shape.v_dim,
                   sum, dv + at * p.shape.v_dim);
      }
    });
  }
}

}  // namespace hetero
