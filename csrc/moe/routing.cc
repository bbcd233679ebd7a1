#include "moe/routing.h"

#include <algorithm>

#include "base/check.h"

namespace hetero {

SlotRange slots_of(const Routing& routing, SlotRange slots, TokenRange tokens) {
  const auto begin = routing.token.begin();
  const auto place = [&](int64_t token) {
    return std::lower_bound(begin + slots.first, begin + slots.end, token) - begin;
  };
  return {place(tokens.first), place(tokens.end)};
}

void check_ids(const int64_t* ids, int64_t num_tokens, int top_k, int num_experts) {
  for (int64_t i = 0; i < num_tokens * top_k; ++i) {
    HETERO_CHECK(ids[i] >= -1 && ids[i] < num_experts, "expert_ids[", i / top_k, ", ", i % top_k,
                 "] is ", ids[i], "; expected -1 (skip) or an expert below ", num_experts);
  }
}

Routing route(const int64_t* ids, const float* weights, int64_t num_tokens, int top_k,
              int num_experts) {
  Routing routing;
  routing.num_tokens = num_tokens;
  routing.top_k = top_k;
  // A counting sort; it is stable, so token order and then list order remain within an expert.
  std::vector<int64_t>& start = routing.expert_start;
  start.assign(num_experts + 1, 0);
  const int64_t pairs = num_tokens * top_k;
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] >= 0) ++start[ids[i] + 1];
  }
  for (int expert = 0; expert < num_experts; ++expert) start[expert + 1] += start[expert];
  const int64_t slots = start[num_experts];
  routing.token.resize(slots);
  routing.source.resize(slots);
  routing.weight.resize(slots);
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < pairs; ++i) {
    if (ids[i] < 0) continue;
    const int64_t slot = next[ids[i]]++;
    routing.token[slot] = static_cast<int32_t>(i / top_k);
    routing.source[slot] = static_cast<int32_t>(i);
    routing.weight[slot] = weights[i];
  }

  routing.token_start.assign(num_tokens + 1, 0);
  for (int32_t token : routing.token) ++routing.token_start[token + 1];
  for (int64_t token = 0; token < num_tokens; ++token) {
    routing.token_start[token + 1] += routing.token_start[token];
  }
  routing.token_slots.resize(slots);
  std::vector<int64_t> filled(routing.token_start.begin(), routing.token_start.end() - 1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    routing.token_slots[filled[routing.token[slot]]++] = static_cast<int32_t>(slot);
  }
  return routing;
}

}  // namespace hetero
