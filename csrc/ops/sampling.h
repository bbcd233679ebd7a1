// Rows of logits: log-probabilities, their gradient, and sampling. fp32 logits [rows, n].
#pragma once

#include "ops/context.h"

namespace hetero {

// What a softmax at one temperature needs to know of a row. `total` is the sum of exp((x - max) /
// temperature).
struct RowStats {
  float max = 0.0f;
  double inverse_temperature = 1.0;
  double total = 0.0;
  bool finite = true;  // no NaN, no +inf, and not all -inf

  // The only formula for a log-probability: sampling and training give equal bits because both use
  // it.
  float log_prob(float logit) const;
};

// In place: x = cap(factor x), cap(x) = softcap tanh(x / softcap), or x when softcap is 0.
void cap_logits(Context& context, float* x, int64_t rows, int n, float factor, float softcap);

struct TokenRows {
  const float* logits = nullptr;       // [rows, n]
  const int64_t* targets = nullptr;    // [rows]
  const float* temperature = nullptr;  // [rows]
  int64_t rows = 0;
  int n = 0;
};

// logp and entropy [rows]; max and inverse_total [rows] are kept for the gradient.
void token_logprobs(Context& context, const TokenRows& tokens, float* logp, float* entropy,
                    float* max, float* inverse_total);

// dlogits [rows, n] bf16 with respect to the linear layer's output, i.e. through factor and
// softcap. `gradient` [rows] is that of logp.
void token_logprobs_backward(Context& context, const TokenRows& tokens, const float* max,
                             const float* inverse_total, const float* gradient, float factor,
                             float softcap, uint16_t* dlogits);

struct SampleRows {
  const float* logits = nullptr;  // [rows, n]
  int64_t rows = 0;
  int n = 0;
  // [rows] each
  const float* temperature = nullptr;  // 0: the largest logit, ties to the lower id
  const float* top_p = nullptr;        // 1: all
  const int32_t* top_k = nullptr;      // 0: all
  const float* min_p = nullptr;        // 0: all
  const uint64_t* keys = nullptr;      // [rows, 4] (seed, task, sample, position)
};

// ids [rows]: -1 when the row has NaN or +inf or nothing but -inf. logp: of the distribution that
// was sampled. raw: of all tokens at that temperature (at 1 for greedy rows).
void sample(Context& context, const SampleRows& rows, int64_t* ids, float* logp, float* raw);

}  // namespace hetero
