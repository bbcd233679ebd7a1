// Which tokens of a row may be sampled: top-k, then top-p over what it left, then min-p.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hetero {

// Works on weights w = exp((logit - max) / temperature) in [0, 1], ordered from the largest down,
// ties by ascending id. Instead of sorting a vocabulary it counts the weights in buckets of their
// leading bits and sorts one bucket.
class LogitFilter {
 public:
  // Sets the weights of the tokens that are filtered out to 0.
  void apply(float* weights, int n, int top_k, float top_p, float min_p) {
    limit_ = {0.0f, n};  // of what is kept, the last in order
    if ((top_k > 0 && top_k < n) || top_p < 1.0f) {
      count(weights, n);
      double mass = total_mass_;
      if (top_k > 0 && top_k < n) mass = cut(weights, n, top_k, 2.0 * total_mass_);
      if (top_p < 1.0f) cut(weights, n, n, top_p * mass);
    }
    for (int i = 0; i < n; ++i) {
      if (before(limit_, {weights[i], i}) || weights[i] < min_p) weights[i] = 0.0f;
    }
  }

 private:
  struct Token {
    float weight;
    int id;
  };
  static bool before(const Token& a, const Token& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
  }

  // Sign, exponent and four bits of the significand: 2033 buckets reach up to 1.
  static constexpr int kBuckets = 2048;
  static int bucket(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof(bits));
    return static_cast<int>(bits >> 19);
  }

  void count(const float* weights, int n) {
    counts_.fill(0);
    masses_.fill(0.0);
    for (int i = 0; i < n; ++i) {
      ++counts_[bucket(weights[i])];
      masses_[bucket(weights[i])] += weights[i];
    }
    total_mass_ = 0.0;
    for (double mass : masses_) total_mass_ += mass;
  }

  // Walks down to the token at which `tokens` tokens or a mass of `target` are reached, whatever
  // comes first, lowers the limit to it and returns the mass up to it.
  double cut(const float* weights, int n, int tokens, double target) {
    int b = kBuckets - 1, kept = 0;
    double mass = 0.0;
    for (; b > 0; --b) {
      const bool passes = kept + counts_[b] < tokens && mass + masses_[b] < target;
      if (counts_[b] > 0 && !passes) break;
      kept += counts_[b];
      mass += masses_[b];
    }
    sorted_.clear();
    Token last = limit_;
    for (int i = 0; i < n; ++i) {
      if (bucket(weights[i]) == b) sorted_.push_back({weights[i], i});
    }
    std::sort(sorted_.begin(), sorted_.end(), before);
    for (const Token& token : sorted_) {
      if (before(limit_, token)) break;
      mass += token.weight;
      ++kept;
      last = token;
      if (kept >= tokens || mass >= target) break;
    }
    limit_ = last;
    return mass;
  }

  Token limit_{};
  std::array<int, kBuckets> counts_;
  std::array<double, kBuckets> masses_;
  double total_mass_ = 0.0;
  std::vector<Token> sorted_;
};

}  // namespace hetero
