// Which tokens of a row may be sampled: top-k, then top-p over what it left, then min-p.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernel.h"

namespace hetero {

// Works on weights w = exp((logit - max) / temperature) in [0, 1], ordered from the largest down,
// ties by ascending id. A vocabulary is never sorted: a heap finds the top k, and buckets of
// leading bits the few tokens among which a mass is reached.
class LogitFilter {
 public:
  // Sets the weights of the tokens that are filtered out to 0. `total` is the sum of all weights.
  void apply(const KernelSet& kernels, float* weights, int n, double total, int top_k, float top_p,
             float min_p) {
    Token last{0.0f, n};  // of what is kept, the last in order
    const bool limit_count = top_k > 0 && top_k < n;
    if (limit_count) {
      keep_largest(kernels, weights, n, top_k);
      total = 0.0;
      for (const Token& token : tokens_) total += token.weight;
      last = tokens_.front();  // the heap's top is the least likely
    }
    if (top_p < 1.0f) {
      const double target = std::max(top_p * total, 1e-300);  // at least one token
      last = pass_mass(limit_count ? 0.0 : keep_around(weights, n, target), target);
    }
    // A weight that equals the last one's is kept up to its id.
    const int ties = std::min(n, last.id + 1);
    kernels.clear_below(weights, ties, std::max(last.weight, min_p));
    kernels.clear_below(weights + ties, n - ties,
                        std::max(std::nextafter(last.weight, 2.0f), min_p));
  }

 private:
  struct Token {
    float weight;
    int id;
  };
  static bool before(const Token& a, const Token& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.id < b.id);
  }

  // The k first in order, as a heap with the last of them on top.
  void keep_largest(const KernelSet& kernels, const float* weights, int n, int k) {
    tokens_.clear();
    for (int i = 0; i < k; ++i) tokens_.push_back({weights[i], i});
    std::make_heap(tokens_.begin(), tokens_.end(), before);
    // Ids ascend, so a tie with the last comes behind it.
    const auto next = [&](int from) {
      return kernels.find_above(weights, from, n, tokens_.front().weight);
    };
    for (int i = next(k); i < n; i = next(i + 1)) {
      std::pop_heap(tokens_.begin(), tokens_.end(), before);
      tokens_.back() = {weights[i], i};
      std::push_heap(tokens_.begin(), tokens_.end(), before);
    }
  }

  // The tokens among which the mass, summed in order, reaches the target: those whose weights share
  // their leading bits. Returns the mass before them.
  double keep_around(const float* weights, int n, double target) {
    masses_.fill(0.0);
    for (int i = 0; i < n; ++i) masses_[leading_bits(weights[i])] += weights[i];
    int bucket = kBuckets - 1;
    double passed = 0.0;
    for (; bucket > 0 && passed + masses_[bucket] < target; --bucket) passed += masses_[bucket];
    while (masses_[bucket] == 0.0)
      ++bucket;  // rounding kept the sum below the target: the last one
    tokens_.clear();
    for (int i = 0; i < n; ++i) {
      if (leading_bits(weights[i]) == bucket) tokens_.push_back({weights[i], i});
    }
    return passed;
  }

  // Exponent and four bits of the significand; 1 is in bucket 2032.
  static constexpr int kBuckets = 2048;
  static int leading_bits(float weight) {
    return static_cast<int>(std::bit_cast<uint32_t>(weight) >> 19);
  }

  // The token with which the mass, summed in order from `passed` on, reaches the target.
  Token pass_mass(double passed, double target) {
    auto first = tokens_.begin(), end = tokens_.end();
    while (end - first > 32) {
      const Token pivot = middle(*first, first[(end - first) / 2], end[-1]);
      const auto cut =
          std::partition(first, end, [&](const Token& token) { return !before(pivot, token); });
      double mass = passed;
      for (auto it = first; it != cut; ++it) mass += it->weight;
      // One of the three lies behind the pivot, which lies before the cut: the range shrinks.
      if (mass >= target) {
        end = cut;
      } else {
        passed = mass;
        first = cut;
      }
    }
    std::sort(first, end, before);
    for (; first + 1 != end; ++first) {
      passed += first->weight;
      if (passed >= target) break;
    }
    return *first;
  }

  static Token middle(const Token& a, const Token& b, const Token& c) {
    if (before(a, b)) return before(b, c) ? b : before(a, c) ? c : a;
    return before(a, c) ? a : before(b, c) ? c : b;
  }

  std::vector<Token> tokens_;
  std::array<double, kBuckets> masses_;
};

}  // namespace hetero
