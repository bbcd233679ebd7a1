#include <algorithm>

#include "moe/layer.h"
#include "moe/lora_grads.h"
#include "moe/phases.h"
#include "ops/linear.h"

namespace hetero {
namespace {

class BackwardChunk {
 public:
  BackwardChunk(Context& context, const Saved& saved, const SavedChunk& chunk,
                const ExpertsBackward& args)
      : context_(context),
        op_(context),
        saved_(saved),
        chunk_(chunk),
        routing_(chunk.routing),
        args_(args),
        experts_(*args.experts),
        x_(args.x + chunk.first_token * args.experts->hidden),
        dout_(args.dout + chunk.first_token * args.experts->hidden) {}

  void run() {
    if (args_.lora != nullptr && args_.lora->has_down()) project_dout();
    activation_gradients();
    if (args_.dweights != nullptr) weight_gradients();
    if (args_.lora != nullptr && args_.lora->has_gate_up()) project_dpre();
    if (args_.dx != nullptr) input_gradient();
    if (args_.lora != nullptr) {
      add_lora_grads(context_, {&experts_, args_.lora, &chunk_, x_, dout_, dpre_, h_, dz_, dxa_},
                     args_.grads);
    }
  }

 private:
  int64_t slots() const { return routing_.num_slots(); }

  // dz = dout B of the down LoRA, unscaled: one row per token when B is shared, else one per slot.
  void project_dout() {
    const ExpertLora& lora = *args_.lora;
    const int rank_pad = lora.down_rank_pad();
    dz_ = op_.take<uint16_t>((lora.shared_down_b ? routing_.num_tokens : slots()) * rank_pad);
    if (lora.shared_down_b) {
      RowJob job;
      job.main = {row_pointers(op_, dout_, routing_.num_tokens, experts_.hidden), lora.down_b};
      job.num_rows = routing_.num_tokens;
      job.direction = Direction::kTransposed;
      job.out = dz_;
      job.ld = job.width = rank_pad;
      multiply_rows(context_, job);
      return;
    }
    SlotProducts products;
    products.main = {rows_by_token(op_, routing_, dout_, experts_.hidden), lora.down_b};
    products.direction = Direction::kTransposed;
    multiply_slots_into(context_, routing_, products, dz_, rank_pad, Dtype::kBf16);
  }

  const uint16_t* pre_activations() {
    if (saved_.keeps_pre) return chunk_.pre.data();
    auto* pre = op_.take<uint16_t>(slots() * 2 * experts_.i_pad());
    const LoraRun all{{0, routing_.num_tokens}, args_.lora};
    run_up_phase(context_, routing_, {&experts_, {&all, 1}, x_, chunk_.xa.data(), nullptr, pre});
    return pre;
  }

  // g = dout W_down (the gradient of h without the router's weight) gives dpre = d loss / d (gate,
  // up), [S, 2 I_pad] bf16, and the products of g and h, whose sum is the gradient of the router's
  // weight.
  void activation_gradients() {
    const KernelSet& kernels = context_.kernels();
    const int i_pad = experts_.i_pad();
    const uint16_t* pre = pre_activations();
    SlotProducts products;
    products.main = {rows_by_token(op_, routing_, dout_, experts_.hidden), experts_.down};
    products.direction = Direction::kTransposed;
    SlotExtra low_rank;
    if (dz_ != nullptr) {
      const ExpertLora& lora = *args_.lora;
      const int rank_pad = lora.down_rank_pad();
      low_rank.operand[0] = {lora.shared_down_b ? rows_by_token(op_, routing_, dz_, rank_pad)
                                                : rows_by_slot(op_, routing_, dz_, rank_pad),
                             lora.down_a};
      low_rank.scale = lora.scale;
      products.extras = {&low_rank, 1};
      h_ = op_.take<uint16_t>(slots() * i_pad);
    }
    dpre_ = op_.take<uint16_t>(slots() * 2 * i_pad);
    dots_ = op_.take<float>(slots() * (i_pad / kPanel));
    constexpr int kRows = 32;  // at a time: five tiles in the first-level cache
    auto* scratch =
        op_.take<float>(static_cast<size_t>(context_.num_threads()) * 3 * kRows * kPanel);
    const auto differentiate = [&](const Product& product, int tile, float* c, int thread) {
      float* gate = scratch + static_cast<size_t>(thread) * 3 * kRows * kPanel;
      float* up = gate + kRows * kPanel;
      float* h = up + kRows * kPanel;
      const int column = tile * kPanel;
      for (int row = 0; row < product.num_rows; row += kRows, c += kRows * kPanel) {
        const int rows = std::min(kRows, product.num_rows - row), n = rows * kPanel;
        const int64_t slot = product.first + row;
        const uint16_t* from = pre + slot * 2 * i_pad + column;
        kernels.load_tile(from, 2 * i_pad, rows, gate);
        kernels.load_tile(from + i_pad, 2 * i_pad, rows, up);
        kernels.gate(experts_.gate, gate, up, h, n, Dtype::kF32, Dtype::kF32);
        kernels.dot_rows(c, h, rows, dots_ + tile * slots() + slot);
        if (h_ != nullptr)
          kernels.store_tile(h, rows, kPanel, h_ + slot * i_pad + column, i_pad, Dtype::kBf16);
        kernels.scale_rows(c, rows, kPanel, kPanel, routing_.weight.data() + slot);
        kernels.gate_backward(experts_.gate, gate, up, c, gate, up, n, Dtype::kF32, Dtype::kF32);
        uint16_t* to = dpre_ + slot * 2 * i_pad + column;
        kernels.store_tile(gate, rows, kPanel, to, 2 * i_pad, Dtype::kBf16);
        kernels.store_tile(up, rows, kPanel, to + i_pad, 2 * i_pad, Dtype::kBf16);
      }
    };
    multiply_slots(context_, routing_, products, differentiate);
  }

  // d loss / d weight of a slot = its output . dout = h . g (+ bias . dout)
  void weight_gradients() {
    const KernelSet& kernels = context_.kernels();
    const int tiles = experts_.i_pad() / kPanel;
    float* to = args_.dweights + chunk_.first_token * routing_.top_k;
    const int experts = experts_.num_experts;
    context_.parallel(experts, [&](int64_t expert, int) {
      for (int64_t slot = routing_.expert_start[expert]; slot < routing_.expert_start[expert + 1];
           ++slot) {
        float total = 0.0f;
        for (int tile = 0; tile < tiles; ++tile) total += dots_[tile * slots() + slot];
        if (experts_.down_bias != nullptr) {
          const int64_t hidden = experts_.hidden;
          total += kernels.dot_mixed(experts_.down_bias + expert * experts_.down.n_pad(),
                                     dout_ + routing_.token[slot] * hidden, experts_.hidden);
        }
        to[routing_.source[slot]] = total;
      }
    });
  }

  // dxa = dpre B of the gate and up LoRA, unscaled, bf16: [T, 2 r_pad] when A is shared (summed
  // over the token's experts first), else [S, 2 r_pad].
  void project_dpre() {
    const ExpertLora& lora = *args_.lora;
    const int rank_pad = lora.gate_up_rank_pad(), i_pad = experts_.i_pad();
    const bool shared = lora.shared_gate_up_a;
    const Dtype dtype = shared ? Dtype::kF32 : Dtype::kBf16;
    auto* slot_rows = op_.take<std::byte>(slots() * 2 * rank_pad * (shared ? 4 : 2));
    for (int half = 0; half < 2; ++half) {
      SlotProducts products;
      // One half of the rows of every B; the stack is walked in steps of both halves.
      Matrix b = lora.gate_up_b;
      const auto step = static_cast<int64_t>(b.size());
      b.data += half * step / 2;
      b.n = i_pad;
      products.main = {rows_by_slot(op_, routing_, dpre_ + half * i_pad, 2 * i_pad), b, false,
                       step};
      products.direction = Direction::kTransposed;
      multiply_slots_into(context_, routing_, products,
                          slot_rows + half * rank_pad * (shared ? 4 : 2), 2 * rank_pad, dtype);
    }
    if (!shared) {
      dxa_ = reinterpret_cast<uint16_t*>(slot_rows);
      return;
    }
    dxa_ = op_.take<uint16_t>(routing_.num_tokens * 2 * rank_pad);
    TokenSum sum;
    sum.values = reinterpret_cast<const float*>(slot_rows);
    sum.ld = sum.width = 2 * rank_pad;
    sum.weighted = false;
    sum.out = dxa_;
    sum_tokens(context_, routing_, sum);
  }

  void input_gradient() {
    const ExpertLora* lora = args_.lora;
    const int i_pad = experts_.i_pad();
    const int64_t ld = experts_.gate_up.k_pad();
    SlotProducts products;
    products.main = {rows_by_slot(op_, routing_, dpre_, 2 * i_pad), experts_.gate_up};
    products.direction = Direction::kTransposed;
    TokenSum sum;
    SlotExtra low_rank;
    if (dxa_ != nullptr) {
      const int width = 2 * lora->gate_up_rank_pad();
      if (lora->shared_gate_up_a) {
        sum.low_rank = {row_pointers(op_, dxa_, routing_.num_tokens, width), lora->gate_up_a};
        sum.direction = Direction::kTransposed;
        sum.scale = lora->scale;
      } else {
        low_rank.operand[0] = {rows_by_slot(op_, routing_, dxa_, width), lora->gate_up_a};
        low_rank.scale = lora->scale;
        products.extras = {&low_rank, 1};
      }
    }
    auto* slot_dx = op_.take<float>(slots() * ld);
    multiply_slots_into(context_, routing_, products, slot_dx, ld, Dtype::kF32);
    sum.values = slot_dx;
    sum.ld = ld;
    sum.width = experts_.hidden;
    sum.weighted = false;
    const int64_t element = chunk_.first_token * experts_.hidden;
    sum.out =
        static_cast<std::byte*>(args_.dx) + element * (args_.dx_dtype == Dtype::kBf16 ? 2 : 4);
    sum.dtype = args_.dx_dtype;
    sum_tokens(context_, routing_, sum);
  }

  Context& context_;
  Op op_;
  const Saved& saved_;
  const SavedChunk& chunk_;
  const Routing& routing_;
  const ExpertsBackward& args_;
  const Experts& experts_;
  const uint16_t* x_;
  const uint16_t* dout_;
  uint16_t* dpre_ = nullptr;
  uint16_t* h_ = nullptr;  // for the down LoRA
  float* dots_ = nullptr;  // [I_pad / 32, S]
  uint16_t* dz_ = nullptr;
  uint16_t* dxa_ = nullptr;
};

}  // namespace

void experts_backward(Context& context, const Saved& saved, const ExpertsBackward& args) {
  if (args.dweights != nullptr) std::fill_n(args.dweights, saved.num_tokens * saved.top_k, 0.0f);
  for (const SavedChunk& chunk : saved.chunks) BackwardChunk(context, saved, chunk, args).run();
}

}  // namespace hetero
