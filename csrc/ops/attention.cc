#include "ops/attention.h"

#include <cmath>

#include "ops/query_tiles.h"

namespace hetero {
namespace {

struct Scratch {
  Scratch(Carver& carver, const KernelSet& kernels, int rows, int dim_pad, int v_pad)
      : q(carver.take<std::byte>(kernels.a_bytes(rows, dim_pad))),
        weights(carver.take<std::byte>(kernels.a_bytes(rows, kKvBlock))),
        scores(carver.take<float>(static_cast<size_t>(rows) * kKvBlock)),
        out(carver.take<float>(static_cast<size_t>(rows) * v_pad)),
        p(carver.take<uint16_t>(static_cast<size_t>(rows) * kKvBlock)),
        max(carver.take<float>(rows)),
        sum(carver.take<float>(rows)),
        factor(carver.take<float>(rows)),
        lo(carver.take<int32_t>(rows)),
        hi(carver.take<int32_t>(rows)),
        pointers(carver.take<const uint16_t*>(rows)) {}
  void *q, *weights;  // left operands
  float *scores, *out;
  uint16_t* p;
  float *max, *sum, *factor;
  int32_t *lo, *hi;
  const uint16_t** pointers;
};

// Asks for a panel of `values` bf16 that the next block will read: blocks lie scattered, so the
// processor does not see them coming.
void prefetch(const uint16_t* panel, int values) {
  for (int i = 0; i < values; i += 32) __builtin_prefetch(panel + i, 0, 2);
}

class Forward {
 public:
  Forward(const KernelSet& kernels, const AttentionShape& shape, HeadRows q, const KvBlocks& kv,
          const AttentionParams& params)
      : kernels_(kernels),
        shape_(shape),
        q_(q),
        kv_(kv),
        params_(params),
        group_(shape.heads / shape.kv_heads),
        dim_pad_(round_up(shape.dim, kPanel)),
        v_pad_(round_up(shape.v_dim, kPanel)) {}

  void run(const QueryTile& tile, int kv_head, Scratch& s, uint16_t* out, float* lse) const {
    const int rows = tile.queries * group_;
    for (int r = 0; r < rows; ++r) {
      s.pointers[r] = q_.at(tile.row + r / group_, kv_head * group_ + r % group_);
    }
    kernels_.pack_a(s.pointers, rows, shape_.dim, dim_pad_, s.q);
    std::fill_n(s.max, rows, -INFINITY);
    std::fill_n(s.sum, rows, 0.0f);
    std::fill_n(s.out, static_cast<size_t>(rows) * v_pad_, 0.0f);
    for (int r = 0; r < rows; ++r) s.pointers[r] = s.p + r * kKvBlock;
    const int32_t* table = kv_.table(tile.segment);
    const auto at = [&](int b) {
      return static_cast<int64_t>(table[b]) * shape_.kv_heads + kv_head;
    };
    const int last = tile.last_block();
    for (int b = tile.first_block(params_.window); b <= last; ++b) {
      block(tile, rows, b, at(b), at(std::min(b + 1, last)), s);
    }
    finish(tile, rows, kv_head, s, out, lse);
  }

 private:
  // Block b of the segment is number `at` of the KV blocks; `next` comes after it.
  void block(const QueryTile& tile, int rows, int b, int64_t at, int64_t next, Scratch& s) const {
    for (int r = 0; r < rows; ++r) {
      visible_columns(tile.position + r / group_, params_.window, b, s.lo + r, s.hi + r);
    }
    const Scores scores{rows, s.lo, s.hi, params_.scale, params_.softcap};
    if (next != at) prefetch(kv_.k + next * dim_pad_ * kKvBlock, dim_pad_ * kKvBlock);
    kernels_.gemm(s.q, rows, dim_pad_, kv_.k + at * dim_pad_ * kKvBlock, s.scores, kKvBlock, false);
    kernels_.attend(scores, s.scores, s.max, s.sum, s.factor, s.p);
    kernels_.scale_rows(s.out, rows, v_pad_, v_pad_, s.factor);
    kernels_.pack_a(s.pointers, rows, kKvBlock, kKvBlock, s.weights);
    if (next != at) prefetch(kv_.v + next * v_pad_ * kKvBlock, v_pad_ * kKvBlock);
    const uint16_t* values = kv_.v + at * v_pad_ * kKvBlock;
    for (int d = 0; d < v_pad_; d += kPanel) {
      kernels_.gemm(s.weights, rows, kKvBlock, values + d * kKvBlock, s.out + d, v_pad_, true);
    }
  }

  void finish(const QueryTile& tile, int rows, int kv_head, Scratch& s, uint16_t* out,
              float* lse) const {
    for (int r = 0; r < rows; ++r) {
      const int head = kv_head * group_ + r % group_;
      const int64_t at = (tile.row + r / group_) * static_cast<int64_t>(shape_.heads) + head;
      kernels_.attend_finish(s.out + static_cast<size_t>(r) * v_pad_, shape_.v_dim,
                             params_.sinks == nullptr ? nullptr : params_.sinks + head, s.max + r,
                             s.sum + r, out + at * shape_.v_dim);
      if (lse != nullptr) lse[at] = s.max[r] + std::log(s.sum[r]);
    }
  }

  const KernelSet& kernels_;
  const AttentionShape& shape_;
  HeadRows q_;
  const KvBlocks& kv_;
  const AttentionParams& params_;
  int group_, dim_pad_, v_pad_;
};

}  // namespace

void attend_blocks(Context& context, const AttentionShape& shape, HeadRows q,
                   const Segments& segments, const KvBlocks& kv, const AttentionParams& params,
                   uint16_t* out, float* lse) {
  Op op(context);
  const int group = shape.heads / shape.kv_heads;
  const std::vector<QueryTile> tiles = query_tiles(segments, tile_queries(group));
  std::vector<Scratch> scratch =
      thread_scratch<Scratch>(context, op, context.kernels(), tile_queries(group) * group,
                              round_up(shape.dim, kPanel), round_up(shape.v_dim, kPanel));
  const Forward forward(context.kernels(), shape, q, kv, params);
  const int64_t tasks = static_cast<int64_t>(tiles.size()) * shape.kv_heads;
  context.parallel(tasks, [&](int64_t task, int thread) {
    const int head = static_cast<int>(task % shape.kv_heads);
    forward.run(tiles[task / shape.kv_heads], head, scratch[thread], out, lse);
  });
}

void attention(Context& context, const AttentionShape& shape, HeadRows q, HeadRows k, HeadRows v,
               const Segments& segments, const TrainingRows& rows, const AttentionParams& params,
               uint16_t* out, float* lse) {
  Op op(context);
  const KvPlan plan = plan_blocks(rows.kv_rows, rows.kv_start, segments.count);
  const size_t blocks = static_cast<size_t>(plan.num_blocks()) * shape.kv_heads * kKvBlock;
  uint16_t* keys = op.take<uint16_t>(blocks * round_up(shape.dim, kPanel));
  uint16_t* values = op.take<uint16_t>(blocks * round_up(shape.v_dim, kPanel));
  pack_blocks(context, plan, k, shape.kv_heads, shape.dim, /*token_panels=*/false, keys);
  pack_blocks(context, plan, v, shape.kv_heads, shape.v_dim, /*token_panels=*/true, values);
  const KvBlocks kv{keys, values, plan.tables.data(), plan.starts.data(), 0};
  attend_blocks(context, shape, q, segments, kv, params, out, lse);
}

}  // namespace hetero
