// Routing: which expert computes which token, as lists sorted by expert.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace hetero {

// A slot is one (token, expert) pair that is to be computed. Slots are sorted by expert, then by
// token, then by position in the token's list, so that an expert's slots are adjacent and the slots
// of a token, in ascending order, are its experts in ascending order.
struct Routing {
  int64_t num_tokens = 0;
  int top_k = 0;
  std::vector<int64_t> expert_start;  // [E + 1]: first slot of each expert
  std::vector<int32_t> token;         // [S]
  std::vector<int32_t> source;        // [S]: token * top_k + position, index into ids and weights
  std::vector<float> weight;          // [S]
  std::vector<int64_t> token_start;   // [T + 1]: first entry of each token in token_slots
  std::vector<int32_t> token_slots;   // [S]: ascending within a token

  int64_t num_slots() const { return static_cast<int64_t>(token.size()); }
};

// Tokens [first, end).
struct TokenRange {
  int64_t first = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};

// The slots [first, end) of `slots`, which are some of one expert's, whose tokens are in `tokens`.
struct SlotRange {
  int64_t first = 0;
  int64_t end = 0;

  int64_t size() const { return end - first; }
};

SlotRange slots_of(const Routing& routing, SlotRange slots, TokenRange tokens);

// Throws unless every id is -1 (skip) or an expert.
void check_ids(const int64_t* ids, int64_t num_tokens, int top_k, int num_experts);

// ids and weights [T, top_k]; ids of -1 give no slot. An expert may appear twice in a token.
Routing route(const int64_t* ids, const float* weights, int64_t num_tokens, int top_k,
              int num_experts);

}  // namespace hetero
