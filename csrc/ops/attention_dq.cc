#include "ops/attention_grad.h"

namespace hetero {
namespace {

struct Scratch {
  Scratch(Carver& carver, const AttentionGrad& p, int rows)
      : q(carver.take<std::byte>(p.kernels.a_bytes(rows, p.dim_pad))),
        dout(carver.take<std::byte>(p.kernels.a_bytes(rows, p.v_pad))),
        ds(carver.take<std::byte>(p.kernels.a_bytes(rows, kKvBlock))),
        s(carver.take<float>(static_cast<size_t>(rows) * kKvBlock)),
        dp(carver.take<float>(static_cast<size_t>(rows) * kKvBlock)),
        dq(carver.take<float>(static_cast<size_t>(rows) * p.dim_pad)),
        ds_rows(carver.take<uint16_t>(static_cast<size_t>(rows) * kKvBlock)),
        lse(carver.take<float>(rows)),
        delta(carver.take<float>(rows)),
        lo(carver.take<int32_t>(rows)),
        hi(carver.take<int32_t>(rows)),
        pointers(carver.take<const uint16_t*>(rows)) {}
  void *q, *dout, *ds;  // left operands
  float *s, *dp, *dq;
  uint16_t* ds_rows;
  float *lse, *delta;
  int32_t *lo, *hi;
  const uint16_t** pointers;
};

// k_dim, v_dim: dim panels of keys and values; k_token: token panels of keys.
void tile_gradient(const AttentionGrad& p, const QueryTile& tile, int kv_head,
                   const uint16_t* k_dim, const uint16_t* v_dim, const uint16_t* k_token,
                   Scratch& s, uint16_t* dq) {
  const int rows = tile.queries * p.group;
  const auto head = [&](int r) { return kv_head * p.group + r % p.group; };
  const auto row = [&](int r) { return tile.row + r / p.group; };
  for (int r = 0; r < rows; ++r) s.pointers[r] = p.q.at(row(r), head(r));
  p.kernels.pack_a(s.pointers, rows, p.shape.dim, p.dim_pad, s.q);
  for (int r = 0; r < rows; ++r) s.pointers[r] = p.dout.at(row(r), head(r));
  p.kernels.pack_a(s.pointers, rows, p.shape.v_dim, p.v_pad, s.dout);
  for (int r = 0; r < rows; ++r) {
    const int64_t at = static_cast<int64_t>(row(r)) * p.shape.heads + head(r);
    s.lse[r] = p.lse[at];
    s.delta[r] = p.delta[at];
    s.pointers[r] = s.ds_rows + r * kKvBlock;
  }
  std::fill_n(s.dq, static_cast<size_t>(rows) * p.dim_pad, 0.0f);
  const int32_t* table = p.plan.tables.data() + p.plan.starts[tile.segment];
  for (int b = tile.first_block(p.params.window); b <= tile.last_block(); ++b) {
    for (int r = 0; r < rows; ++r) {
      visible_columns(tile.position + r / p.group, p.params.window, b, s.lo + r, s.hi + r);
    }
    const Scores scores{rows, s.lo, s.hi, p.params.scale, p.params.softcap};
    const size_t k_at = p.block_at(table[b], kv_head, p.dim_pad);
    const size_t v_at = p.block_at(table[b], kv_head, p.v_pad);
    p.kernels.gemm(s.q, rows, p.dim_pad, k_dim + k_at, s.s, kKvBlock, false);
    p.kernels.gemm(s.dout, rows, p.v_pad, v_dim + v_at, s.dp, kKvBlock, false);
    p.kernels.attend_backward(scores, s.s, s.dp, s.lse, s.delta, s.ds_rows);
    p.kernels.pack_a(s.pointers, rows, kKvBlock, kKvBlock, s.ds);
    for (int d = 0; d < p.dim_pad; d += kPanel) {
      const uint16_t* panel = k_token + k_at + d * kKvBlock;
      p.kernels.gemm(s.ds, rows, kKvBlock, panel, s.dq + d, p.dim_pad, true);
    }
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t at = static_cast<int64_t>(row(r)) * p.shape.heads + head(r);
    p.kernels.to_bf16(s.dq + static_cast<size_t>(r) * p.dim_pad, dq + at * p.shape.dim,
                      p.shape.dim);
  }
}

}  // namespace

void query_gradients(Context& context, const AttentionGrad& p, uint16_t* dq) {
  Op op(context);
  const size_t blocks = static_cast<size_t>(p.plan.num_blocks()) * p.shape.kv_heads * kKvBlock;
  uint16_t* k_dim = op.take<uint16_t>(blocks * p.dim_pad);
  uint16_t* v_dim = op.take<uint16_t>(blocks * p.v_pad);
  uint16_t* k_token = op.take<uint16_t>(blocks * p.dim_pad);
  pack_blocks(context, p.plan, p.k, p.shape.kv_heads, p.shape.dim, /*token_panels=*/false, k_dim);
  pack_blocks(context, p.plan, p.v, p.shape.kv_heads, p.shape.v_dim, /*token_panels=*/false, v_dim);
  pack_blocks(context, p.plan, p.k, p.shape.kv_heads, p.shape.dim, /*token_panels=*/true, k_token);
  const std::vector<QueryTile> tiles = query_tiles(p.segments, tile_queries(p.group));
  std::vector<Scratch> scratch =
      thread_scratch<Scratch>(context, op, p, tile_queries(p.group) * p.group);
  const int64_t tasks = static_cast<int64_t>(tiles.size()) * p.shape.kv_heads;
  context.parallel(tasks, [&](int64_t task, int thread) {
    const int head = static_cast<int>(task % p.shape.kv_heads);
    tile_gradient(p, tiles[task / p.shape.kv_heads], head, k_dim, v_dim, k_token, scratch[thread],
                  dq);
  });
}

}  // namespace hetero
