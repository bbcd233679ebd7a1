#include "ops/attention_grad.h"
#include "ops/rows.h"

namespace hetero {

void attention_backward(Context& context, const AttentionShape& shape, HeadRows q, HeadRows k,
                        HeadRows v, const uint16_t* out, const float* lse, HeadRows dout,
                        const Segments& segments, const TrainingRows& rows,
                        const AttentionParams& params, uint16_t* dq, uint16_t* dk, uint16_t* dv) {
  Op op(context);
  const KvPlan plan = plan_blocks(rows.kv_rows, rows.kv_start, segments.count);
  float* delta = op.take<float>(shape.tokens * shape.heads);
  for_rows(context, shape.tokens, shape.heads * shape.v_dim, [&](int64_t row) {
    for (int head = 0; head < shape.heads; ++head) {
      const int64_t at = row * shape.heads + head;
      delta[at] =
          context.kernels().dot_bf16(dout.at(row, head), out + at * shape.v_dim, shape.v_dim);
    }
  });
  const AttentionGrad problem{context.kernels(),
                              shape,
                              params,
                              plan,
                              segments,
                              q,
                              k,
                              v,
                              dout,
                              lse,
                              delta,
                              shape.heads / shape.kv_heads,
                              round_up(shape.dim, kPanel),
                              round_up(shape.v_dim, kPanel)};
  query_gradients(context, problem, dq);
  key_gradients(context, problem, dk, dv);
}

}  // namespace hetero
