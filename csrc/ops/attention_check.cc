#include <algorithm>

#include "base/check.h"
#include "ops/attention.h"

namespace hetero {

void check_segments(const AttentionShape& shape, const Segments& segments) {
  HETERO_CHECK(segments.count == 0 || segments.q_start[0] >= 0, "q_start begins at ",
               segments.q_start[0], "; expected 0 or more");
  for (int s = 0; s < segments.count; ++s) {
    const int first = segments.q_start[s], end = segments.q_start[s + 1];
    HETERO_CHECK(first <= end && end <= shape.tokens, "segment ", s, " owns the query rows ", first,
                 " to ", end, " of ", shape.tokens, "; q_start must ascend and stay within them");
    HETERO_CHECK(segments.kv_len[s] >= end - first, "segment ", s, " has ", end - first,
                 " queries but kv_len ", segments.kv_len[s],
                 "; kv_len counts the queries' own positions too");
  }
}

void check_training(const AttentionShape& shape, const Segments& segments, const TrainingRows& rows,
                    int64_t num_rows) {
  for (int s = 0; s < segments.count; ++s) {
    const int64_t first = rows.kv_start[s], end = rows.kv_start[s + 1];
    HETERO_CHECK(first >= 0 && end <= num_rows && end - first == segments.kv_len[s], "segment ", s,
                 " has kv_len ", segments.kv_len[s], " but kv_start gives it the entries ", first,
                 " to ", end, " of ", num_rows, " in kv_rows");
  }
  for (int64_t i = 0; i < num_rows; ++i) {
    HETERO_CHECK(rows.kv_rows[i] >= 0 && rows.kv_rows[i] < shape.kv_tokens, "kv_rows[", i, "] is ",
                 rows.kv_rows[i], "; expected a row below ", shape.kv_tokens);
  }
}

void check_paged(const Segments& segments, const KvBlocks& kv, int window, int64_t num_blocks) {
  for (int s = 0; s < segments.count; ++s) {
    const int64_t needed = (segments.kv_len[s] + kKvBlock - 1) / kKvBlock;
    HETERO_CHECK(needed <= kv.stride, "segment ", s, " has kv_len ", segments.kv_len[s],
                 " and needs ", needed, " blocks, but block_tables has ", kv.stride, " columns");
    // What lies before the first query's window may have been given away.
    const int first = segments.kv_len[s] - (segments.q_start[s + 1] - segments.q_start[s]);
    for (int64_t b = window > 0 ? std::max(0, first - window + 1) / kKvBlock : 0; b < needed; ++b) {
      const int32_t block = kv.table(s)[b];
      HETERO_CHECK(block >= 0 && block < num_blocks, "block_tables[", s, ", ", b, "] is ", block,
                   "; the pool has ", num_blocks, " blocks");
    }
  }
}

void check_slots(const int64_t* slots, int64_t tokens, int64_t num_blocks) {
  for (int64_t t = 0; t < tokens; ++t) {
    HETERO_CHECK(slots[t] >= 0 && slots[t] < num_blocks * kKvBlock, "slots[", t, "] is ", slots[t],
                 "; the pool has ", num_blocks, " blocks of ", kKvBlock);
  }
}

}  // namespace hetero
