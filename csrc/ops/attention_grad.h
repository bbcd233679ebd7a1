// The two passes of attention's gradient.
//
// With s the raw scores, z = cap(scale s), P = exp(z - lse), dP = dO . V and delta = rowsum(dO *
// O):
//   dS = P (dP - delta) dz/ds,  dQ = dS . K,  dK = dS^T . Q,  dV = P^T . dO.
// Two passes: one over query tiles for dQ, one over KV blocks for dK and dV. Each element is the
// work of one task, so nothing is shared and the order of every sum is fixed; scores are computed
// twice for it.
#pragma once

#include <vector>

#include "ops/attention.h"
#include "ops/query_tiles.h"

namespace hetero {

struct AttentionGrad {
  const KernelSet& kernels;
  const AttentionShape& shape;
  const AttentionParams& params;
  const KvPlan& plan;
  const Segments& segments;
  HeadRows q, k, v, dout;
  const float* lse;    // [tokens, heads]
  const float* delta;  // [tokens, heads]
  int group, dim_pad, v_pad;

  size_t block_at(int block, int kv_head, int pad) const {
    return (static_cast<size_t>(block) * shape.kv_heads + kv_head) * pad * kKvBlock;
  }
};

// dq [tokens, heads, dim].
void query_gradients(Context& context, const AttentionGrad& p, uint16_t* dq);

// dk [kv_tokens, kv_heads, dim] and dv [kv_tokens, kv_heads, v_dim].
void key_gradients(Context& context, const AttentionGrad& p, uint16_t* dk, uint16_t* dv);

}  // namespace hetero
