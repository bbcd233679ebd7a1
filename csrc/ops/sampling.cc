#include "ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/logit_filter.h"
#include "ops/philox.h"
#include "ops/rows.h"

namespace hetero {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A temperature near 0 must not turn 0 / temperature into NaN.
float inverse(float temperature) {
  return std::min(1.0f / temperature, std::numeric_limits<float>::max());
}

int num_sums(int n) { return (n + kSumBlock - 1) / kSumBlock; }

double total_of(const float* sums, int n) {
  double total = 0.0;
  for (int b = 0; b < num_sums(n); ++b) total += sums[b];
  return total;
}

// Fills sums; moments and weights may be null.
RowStats row_stats(const KernelSet& kernels, const float* x, int n, float temperature, float* sums,
                   float* moments, float* weights) {
  RowStats stats;
  stats.max = kernels.max_logit(x, n, &stats.finite);
  stats.finite = stats.finite && std::isfinite(stats.max);
  const LogitRow row{n, stats.max, inverse(temperature)};
  kernels.exp_logits(row, x, sums, moments, weights);
  stats.inverse_temperature = row.inverse_temperature;
  stats.total = total_of(sums, n);
  return stats;
}

// The first token, in order of ids, at which the sum of the weights passes u times their total.
int pick(const float* weights, const float* sums, int n, double total, double u) {
  const double target = u * total;
  double passed = 0.0;
  int block = 0;
  for (int b = 0; b < num_sums(n); ++b) {
    if (sums[b] == 0.0f) continue;
    block = b;
    if (passed + sums[b] > target) break;
    passed += sums[b];
  }
  // The block's own sum was taken in another order: when it is not reached, its last token is
  // meant.
  int chosen = 0;
  const int end = std::min(n, (block + 1) * kSumBlock);
  for (int i = block * kSumBlock; i < end; ++i) {
    if (weights[i] == 0.0f) continue;
    chosen = i;
    passed += weights[i];
    if (passed > target) break;
  }
  return chosen;
}

struct Scratch {
  float* weights;
  float* sums;
  LogitFilter filter;
};

void sample_row(const KernelSet& kernels, const SampleRows& rows, int64_t r, Scratch& scratch,
                int64_t* id, float* logp, float* raw) {
  const float* x = rows.logits + r * rows.n;
  const bool greedy = rows.temperature[r] == 0.0f;
  const float temperature = greedy ? 1.0f : rows.temperature[r];
  const RowStats stats =
      row_stats(kernels, x, rows.n, temperature, scratch.sums, nullptr, scratch.weights);
  if (!stats.finite) {
    *id = -1;
    *logp = *raw = kNan;
    return;
  }
  if (greedy) {
    *id = std::find(x, x + rows.n, stats.max) - x;
    *logp = 0.0f;
    *raw = stats.log_prob(stats.max);
    return;
  }
  RowStats kept = stats;
  if (rows.top_k[r] > 0 || rows.top_p[r] < 1.0f || rows.min_p[r] > 0.0f) {
    scratch.filter.apply(kernels, scratch.weights, rows.n, stats.total, rows.top_k[r],
                         rows.top_p[r], rows.min_p[r]);
    kernels.sum_blocks(scratch.weights, rows.n, scratch.sums);
    kept.total = total_of(scratch.sums, rows.n);
  }
  const double u = uniform(rows.keys + 4 * r);
  *id = pick(scratch.weights, scratch.sums, rows.n, kept.total, u);
  *logp = kept.log_prob(x[*id]);
  *raw = stats.log_prob(x[*id]);
}

}  // namespace

float RowStats::log_prob(float logit) const {
  return static_cast<float>((static_cast<double>(logit) - max) * inverse_temperature -
                            std::log(total));
}

void cap_logits(Context& context, float* x, int64_t rows, int n, float factor, float softcap) {
  for_rows(context, rows, n,
           [&](int64_t r) { context.kernels().cap_logits(x + r * n, n, factor, softcap); });
}

void token_logprobs(Context& context, const TokenRows& tokens, float* logp, float* entropy,
                    float* max, float* inverse_total) {
  Op op(context);
  const int n = tokens.n;
  float* scratch = op.take<float>(size_t{2} * num_sums(n) * context.num_threads());
  context.parallel(tokens.rows, [&](int64_t r, int thread) {
    float* sums = scratch + size_t{2} * num_sums(n) * thread;
    float* moments = sums + num_sums(n);
    const float* x = tokens.logits + r * n;
    const RowStats stats =
        row_stats(context.kernels(), x, n, tokens.temperature[r], sums, moments, nullptr);
    // With p = exp(z) / total: -sum(p log p) = log(total) - sum(z exp(z)) / total.
    logp[r] = stats.finite ? stats.log_prob(x[tokens.targets[r]]) : kNan;
    entropy[r] = static_cast<float>(std::log(stats.total) - total_of(moments, n) / stats.total);
    max[r] = stats.max;
    inverse_total[r] = static_cast<float>(1.0 / stats.total);
  });
}

void token_logprobs_backward(Context& context, const TokenRows& tokens, const float* max,
                             const float* inverse_total, const float* gradient, float factor,
                             float softcap, uint16_t* dlogits) {
  context.parallel(tokens.rows, [&](int64_t r, int) {
    const float inverse_temperature = inverse(tokens.temperature[r]);
    const LogitRow row{tokens.n, max[r], inverse_temperature};
    context.kernels().logits_backward(
        row, tokens.logits + r * tokens.n, inverse_total[r], static_cast<int>(tokens.targets[r]),
        gradient[r] * inverse_temperature * factor, softcap, dlogits + r * tokens.n);
  });
}

void sample(Context& context, const SampleRows& rows, int64_t* ids, float* logp, float* raw) {
  Op op(context);
  std::vector<Scratch> scratch(context.num_threads());
  for (Scratch& s : scratch) {
    s.weights = op.take<float>(rows.n);
    s.sums = op.take<float>(num_sums(rows.n));
  }
  context.parallel(rows.rows, [&](int64_t r, int thread) {
    sample_row(context.kernels(), rows, r, scratch[thread], ids + r, logp + r, raw + r);
  });
}

}  // namespace hetero
