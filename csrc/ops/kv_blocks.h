// KV blocks: 32 tokens of one KV head, packed so that the gemm kernel can read them.
//
// A dim panel is contracted over the head dimension, its columns are tokens: [dim_pad/2][32][2].
// Token panels are contracted over the 32 tokens, their columns are dimensions:
// [dim_pad/32][16][32][2]. Keys lie in dim panels (S = Q . K), values in token panels (O = P . V).
// Both take dim_pad * 32 values.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/context.h"

namespace hetero {

constexpr int kKvBlock = 32;

// A bf16 array [rows, heads, dim], unit stride in the last axis.
struct HeadRows {
  const uint16_t* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
  const uint16_t* at(int64_t row, int head) const {
    return data + row * row_stride + head * head_stride;
  }
};

// Token panels of up to 32 rows; missing rows and dimensions are zero. (KernelSet::pack_columns
// makes dim panels.)
void pack_token_panels(const KernelSet& kernels, const uint16_t* const* rows, int count, int dim,
                       uint16_t* panels);

// The blocks of a training batch. Segments that list the same 32 rows (a shared prompt) share the
// block.
struct KvPlan {
  std::vector<int32_t> rows;    // [blocks * 32] row of the packed token axis, -1 behind the end
  std::vector<int32_t> tables;  // block of every segment's positions, 32 at a time
  std::vector<int64_t> starts;  // [segments + 1] where a segment's part of `tables` begins
  int num_blocks() const { return static_cast<int>(rows.size() / kKvBlock); }
  int count(int block) const;  // rows in use
};

KvPlan plan_blocks(const int32_t* kv_rows, const int32_t* kv_start, int num_segments);

// [blocks][heads][dim_pad * 32] of the rows of x, as dim panels or token panels.
void pack_blocks(Context& context, const KvPlan& plan, HeadRows x, int heads, int dim,
                 bool token_panels, uint16_t* out);

// Writes the keys [tokens, heads, dim] and values [tokens, heads, v_dim] of new tokens into their
// slots (block * 32 + offset) of a pool. The token at offset 0 clears its block first, so that
// whatever an earlier owner left there, NaN included, cannot reach a product under the causal mask.
void write_kv(Context& context, HeadRows k, HeadRows v, const int64_t* slots, int64_t tokens,
              int heads, int dim, int v_dim, uint16_t* k_pool, uint16_t* v_pool);

}  // namespace hetero
