#include "moe/lora_grads.h"

#include <algorithm>

#include "moe/slots.h"
#include "ops/linear.h"
#include "ops/outer.h"

namespace hetero {
namespace {

using Rows = const uint16_t* const*;

class LoraGrads {
 public:
  LoraGrads(Context& context, const LoraGradInputs& in)
      : context_(context), op_(context), in_(in), routing_(in.chunk->routing), lora_(*in.lora) {}

  void gate_up(const ExpertLoraGrads& grads) {
    const int rank = lora_.gate_up_b.k, rank_pad = lora_.gate_up_rank_pad();
    const int hidden = in_.experts->hidden, size = in_.experts->intermediate,
              i_pad = in_.experts->i_pad();
    const bool shared = lora_.shared_gate_up_a;
    float* const a[2] = {grads.gate_a, grads.up_a};
    float* const b[2] = {grads.gate_b, grads.up_b};
    for (int half = 0; half < 2; ++half) {
      if (a[half] != nullptr) {
        const OuterShape shape{rank, hidden, lora_.scale, hidden, 1};
        const uint16_t* dxa = in_.dxa + half * rank_pad;
        if (shared) {
          per_token(row_pointers(op_, dxa, routing_.num_tokens, 2 * rank_pad),
                    row_pointers(op_, in_.x, routing_.num_tokens, hidden), a[half], shape);
        } else {
          per_expert(rows_by_slot(op_, routing_, dxa, 2 * rank_pad),
                     rows_by_token(op_, routing_, in_.x, hidden), a[half], shape);
        }
      }
      if (b[half] != nullptr) {
        const uint16_t* xa = in_.chunk->xa.data() + half * rank_pad;
        per_expert(shared ? rows_by_token(op_, routing_, xa, 2 * rank_pad)
                          : rows_by_slot(op_, routing_, xa, 2 * rank_pad),
                   rows_by_slot(op_, routing_, in_.dpre + half * i_pad, 2 * i_pad), b[half],
                   {rank, size, lora_.scale, 1, rank});
      }
    }
  }

  void down(const ExpertLoraGrads& grads) {
    const int rank = lora_.down_a.n, rank_pad = lora_.down_rank_pad();
    const int hidden = in_.experts->hidden, size = in_.experts->intermediate;
    const bool shared = lora_.shared_down_b;
    if (grads.down_a != nullptr) {
      Rows dz = shared ? rows_by_token(op_, routing_, in_.dz, rank_pad)
                       : rows_by_slot(op_, routing_, in_.dz, rank_pad);
      per_expert(weighted(dz, rank_pad), rows_by_slot(op_, routing_, in_.h, in_.experts->i_pad()),
                 grads.down_a, {rank, size, lora_.scale, size, 1});
    }
    if (grads.down_b == nullptr) return;
    const OuterShape shape{rank, hidden, lora_.scale, 1, rank};
    const uint16_t* z = in_.chunk->z.data();
    if (shared) {
      per_token(row_pointers(op_, z, routing_.num_tokens, rank_pad),
                row_pointers(op_, in_.dout, routing_.num_tokens, hidden), grads.down_b, shape);
    } else {
      per_expert(weighted(rows_by_slot(op_, routing_, z, rank_pad), rank_pad),
                 rows_by_token(op_, routing_, in_.dout, hidden), grads.down_b, shape);
    }
  }

 private:
  void per_token(Rows left, Rows right, float* out, const OuterShape& shape) {
    const OuterSum sum{left, right, static_cast<int>(routing_.num_tokens), out};
    add_outer_sums(context_, {&sum, 1}, shape);
  }

  void per_expert(Rows left, Rows right, float* out, const OuterShape& shape) {
    const int experts = in_.experts->num_experts;
    auto* sums = op_.take<OuterSum>(experts);
    for (int expert = 0; expert < experts; ++expert) {
      const int64_t first = routing_.expert_start[expert];
      sums[expert] = {left + first, right + first,
                      static_cast<int>(routing_.expert_start[expert + 1] - first),
                      out + static_cast<int64_t>(expert) * shape.m * shape.n};
    }
    add_outer_sums(context_, {sums, static_cast<size_t>(experts)}, shape);
  }

  // Rows of n values, one per slot, times the router's weight, in bf16.
  Rows weighted(Rows rows, int n) {
    const KernelSet& kernels = context_.kernels();
    auto* scaled = op_.take<uint16_t>(routing_.num_slots() * n);
    auto* scratch = op_.take<float>(static_cast<size_t>(context_.num_threads()) * n);
    constexpr int64_t kSlots = 64;  // per task
    context_.parallel((routing_.num_slots() + kSlots - 1) / kSlots, [&](int64_t task, int thread) {
      float* row = scratch + static_cast<size_t>(thread) * n;
      const int64_t end = std::min(routing_.num_slots(), (task + 1) * kSlots);
      for (int64_t slot = task * kSlots; slot < end; ++slot) {
        kernels.to_float(rows[slot], row, n);
        kernels.scale_rows(row, 1, n, n, &routing_.weight[slot]);
        kernels.to_bf16(row, scaled + slot * n, n);
      }
    });
    return rows_by_slot(op_, routing_, scaled, n);
  }

  Context& context_;
  Op op_;
  const LoraGradInputs& in_;
  const Routing& routing_;
  const ExpertLora& lora_;
};

}  // namespace

void add_lora_grads(Context& context, const LoraGradInputs& inputs, const ExpertLoraGrads& grads) {
  if (inputs.lora->has_gate_up()) LoraGrads(context, inputs).gate_up(grads);
  if (inputs.lora->has_down()) LoraGrads(context, inputs).down(grads);
}

}  // namespace hetero
