// Causal attention over KV blocks with online softmax, forward and backward.
//
// A query row walks the blocks of its segment in order and rescales at every block, so its bits
// depend neither on which other rows share the tile nor on whether the blocks are a pool's or a
// training batch's.
#pragma once

#include "ops/kv_blocks.h"

namespace hetero {

struct AttentionShape {
  int64_t tokens = 0;     // query rows
  int64_t kv_tokens = 0;  // key and value rows
  int heads = 0;
  int kv_heads = 0;
  int dim = 0;
  int v_dim = 0;
};

struct AttentionParams {
  float scale = 1.0f;
  int window = 0;                // 0: all earlier positions
  float softcap = 0.0f;          // 0: none
  const float* sinks = nullptr;  // [heads] or null
};

// Query i of segment s is row q_start[s] + i and stands at position kv_len[s] - (number of queries)
// + i.
struct Segments {
  int count = 0;
  const int32_t* q_start = nullptr;
  const int32_t* kv_len = nullptr;
};

// Keys in dim panels and values in token panels. table(s) lists the blocks of segment s.
struct KvBlocks {
  const uint16_t* k = nullptr;  // [blocks][kv_heads][dim_pad * 32]
  const uint16_t* v = nullptr;  // [blocks][kv_heads][v_dim_pad * 32]
  const int32_t* tables = nullptr;
  const int64_t* starts =
      nullptr;  // where each table begins; null: every table has `stride` entries
  int64_t stride = 0;
  const int32_t* table(int s) const {
    return tables + (starts != nullptr ? starts[s] : s * stride);
  }
};

// out [tokens, heads, v_dim]; lse [tokens, heads] (log of the softmax's denominator) or null.
void attend_blocks(Context& context, const AttentionShape& shape, HeadRows q,
                   const Segments& segments, const KvBlocks& kv, const AttentionParams& params,
                   uint16_t* out, float* lse);

// The training layout: packs k [tokens, kv_heads, dim] and v [tokens, kv_heads, v_dim], then
// attends.
struct TrainingRows {
  const int32_t* kv_rows = nullptr;
  const int32_t* kv_start = nullptr;
};

// Each throws std::invalid_argument that names the segment: query rows out of range or more than
// kv_len; rows or blocks that do not exist; slots outside the pool.
void check_segments(const AttentionShape& shape, const Segments& segments);
void check_training(const AttentionShape& shape, const Segments& segments, const TrainingRows& rows,
                    int64_t num_rows);
void check_paged(const Segments& segments, const KvBlocks& kv, int window, int64_t num_blocks);
void check_slots(const int64_t* slots, int64_t tokens, int64_t num_blocks);

void attention(Context& context, const AttentionShape& shape, HeadRows q, HeadRows k, HeadRows v,
               const Segments& segments, const TrainingRows& rows, const AttentionParams& params,
               uint16_t* out, float* lse);

// dq, dk, dv are contiguous [tokens, heads, dim]. A key row shared by several segments gets the sum
// over them, in fp32 and in a fixed order.
void attention_backward(Context& context, const AttentionShape& shape, HeadRows q, HeadRows k,
                        HeadRows v, const uint16_t* out, const float* lse, HeadRows dout,
                        const Segments& segments, const TrainingRows& rows,
                        const AttentionParams& params, uint16_t* dq, uint16_t* dk, uint16_t* dv);

}  // namespace hetero
