// Gradients of the LoRA factors of a chunk.
#pragma once

#include "moe/layer.h"

namespace hetero {

// What the other gradients have left behind.
struct LoraGradInputs {
  const Experts* experts = nullptr;
  const ExpertLora* lora = nullptr;
  const SavedChunk* chunk = nullptr;
  const uint16_t* x = nullptr;     // [T, H] of the chunk
  const uint16_t* dout = nullptr;  // [T, H] of the chunk
  const uint16_t* dpre = nullptr;  // [S, 2 I_pad]
  const uint16_t* h = nullptr;     // [S, I_pad]
  const uint16_t* dz = nullptr;    // dout B: [T, r_pad] (shared B) or [S, r_pad]
  const uint16_t* dxa = nullptr;   // dpre B: [T, 2 r_pad] (shared A) or [S, 2 r_pad]
};

void add_lora_grads(Context& context, const LoraGradInputs& inputs, const ExpertLoraGrads& grads);

}  // namespace hetero
