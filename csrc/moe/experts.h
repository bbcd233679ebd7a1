// The packed experts of one layer, their LoRA factors, and what a forward keeps for backward.
#pragma once

#include "moe/routing.h"
#include "ops/product.h"

namespace hetero {

// E experts: out = down(act(gate(x)) * up(x)). I_pad is the intermediate size rounded up to 32.
struct Experts {
  int num_experts = 0;
  int hidden = 0;        // H
  int intermediate = 0;  // I
  Matrix gate_up;        // E of [2 I_pad, H]: gate's rows, zeros up to I_pad, then up's
  Matrix down;           // E of [H, I]
  const float* gate_up_bias = nullptr;  // [E, 2 I_pad] likewise, or null
  const float* down_bias = nullptr;     // [E, H_pad] or null
  Gate gate;

  int i_pad() const { return down.k_pad(); }
};

// LoRA of rank r (r_pad: rounded up to 32) on every expert. Outer factors are one per layer
// (shared) or one per expert. A pair without data is absent; a missing half of gate_up is zeros.
struct ExpertLora {
  Matrix gate_up_a;  // [2 r_pad, H], or E of them
  Matrix gate_up_b;  // E of [2 I_pad, r]
  Matrix down_a;     // E of [r, I]
  Matrix down_b;     // [H, r], or E of them
  bool shared_gate_up_a = true;
  bool shared_down_b = true;
  float scale = 1.0f;

  bool has_gate_up() const { return gate_up_a.data != nullptr; }
  bool has_down() const { return down_a.data != nullptr; }
  int gate_up_rank_pad() const { return gate_up_b.k_pad(); }
  int down_rank_pad() const { return down_a.n_pad(); }
};

// The adapter of the tokens in `tokens`; null: none, they are computed by the experts alone.
struct LoraRun {
  TokenRange tokens;
  const ExpertLora* lora = nullptr;
};

}  // namespace hetero
