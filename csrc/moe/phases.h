// The phases of a chunk that both forward and backward run.
#pragma once

#include "moe/experts.h"
#include "moe/slots.h"

namespace hetero {

// Gate and up projections with bias and LoRA, and the activation: writes h [S, I_pad] and the
// pre-activations pre [S, 2 I_pad], both bf16, each unless null. The bits are the same whichever of
// the two is asked for.
struct UpPhase {
  const Experts* experts = nullptr;
  std::span<const LoraRun> lora;
  const uint16_t* x = nullptr;   // [T, H]
  const uint16_t* xa = nullptr;  // x A^T of the tokens whose LoRA has a gate and up part
  uint16_t* h = nullptr;
  uint16_t* pre = nullptr;
};

void run_up_phase(Context& context, const Routing& routing, const UpPhase& phase);

// Every slot's row times its matrix, as it is: out [S, ld], columns as wide as the tiles.
void multiply_slots_into(Context& context, const Routing& routing, const SlotProducts& products,
                         void* out, int64_t ld, Dtype dtype);

// The low-rank rows x A^T of the gate and up LoRA of a run: [T, 2 r_pad] when A is shared, [S, 2
// r_pad] when not.
void project_gate_up(Context& context, const Routing& routing, const LoraRun& run,
                     const uint16_t* x, uint16_t* xa);

}  // namespace hetero
