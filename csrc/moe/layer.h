// The experts of a layer, forward and backward.
#pragma once

#include <memory>

#include "moe/saved.h"

namespace hetero {

struct ExpertsForward {
  const Experts* experts = nullptr;
  // In the order of the tokens, without gaps; none: no token has an adapter. All with an adapter
  // have the same parts, ranks and layout. With `save`, at most one.
  std::span<const LoraRun> lora;
  const uint16_t* x = nullptr;     // [T, H] bf16
  const int64_t* ids = nullptr;    // [T, top_k]
  const float* weights = nullptr;  // [T, top_k]
  int64_t num_tokens = 0;
  int top_k = 0;
  void* out = nullptr;  // [T, H]
  Dtype out_dtype = Dtype::kBf16;
  bool save = false;      // for backward
  bool keep_pre = false;  // with `save`: also keep the pre-activations instead of recomputing them
};

// out[t] = sum of weight * expert(x[t]) over the token's experts in ascending order, fp32, rounded
// once. The bits of a row depend on that row alone. Returns what backward needs, or null without
// `save`.
std::unique_ptr<Saved> experts_forward(Context& context, const ExpertsForward& args);

// Gradients of the LoRA factors, fp32, added to; null where not wanted.
struct ExpertLoraGrads {
  float* gate_a = nullptr;  // [r, H] or [E, r, H]
  float* up_a = nullptr;
  float* gate_b = nullptr;  // [E, I, r]
  float* up_b = nullptr;
  float* down_a = nullptr;  // [E, r, I]
  float* down_b = nullptr;  // [H, r] or [E, H, r]
};

struct ExpertsBackward {
  const Experts* experts = nullptr;
  const ExpertLora* lora = nullptr;
  const uint16_t* x = nullptr;     // [T, H] as in forward
  const uint16_t* dout = nullptr;  // [T, H] bf16
  void* dx = nullptr;              // [T, H] or null
  Dtype dx_dtype = Dtype::kBf16;
  float* dweights = nullptr;  // [T, top_k] or null; skipped pairs get 0
  ExpertLoraGrads grads;
};

void experts_backward(Context& context, const Saved& saved, const ExpertsBackward& args);

}  // namespace hetero
