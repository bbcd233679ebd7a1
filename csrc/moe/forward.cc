#include <algorithm>

#include "base/check.h"
#include "moe/layer.h"
#include "moe/phases.h"
#include "ops/linear.h"

namespace hetero {
namespace {

// Tokens computed together. Scratch is bounded, and yet an expert sees rows enough to be worth
// reading its weights. Depends on the layer only: it is part of the numerics of the LoRA gradients.
int64_t chunk_tokens(const Experts& experts, int top_k) {
  constexpr int64_t kScratch = int64_t{128} << 20;
  const int64_t slot_bytes = int64_t{4} * experts.down.n_pad() + int64_t{6} * experts.i_pad();
  return std::max<int64_t>(256, kScratch / (slot_bytes * top_k));
}

class ForwardChunk {
 public:
  ForwardChunk(Context& context, const ExpertsForward& args, SavedChunk& chunk)
      : context_(context),
        op_(context),
        args_(args),
        experts_(*args.experts),
        chunk_(chunk),
        routing_(chunk.routing) {
    const int64_t first = chunk.first_token;
    for (const auto& [tokens, lora] : args.lora) {
      const TokenRange own{std::max<int64_t>(tokens.first - first, 0),
                           std::min(tokens.end - first, routing_.num_tokens)};
      if (own.first >= own.end) continue;
      runs_.push_back({own, lora});
      if (lora != nullptr) adapter_ = lora;
    }
  }

  void run() {
    const int i_pad = experts_.i_pad();
    const uint16_t* x = args_.x + chunk_.first_token * experts_.hidden;
    if (adapter_ != nullptr && adapter_->has_gate_up()) {
      const int64_t rows = adapter_->shared_gate_up_a ? routing_.num_tokens : slots();
      chunk_.xa = Kept<uint16_t>(context_, rows * 2 * adapter_->gate_up_rank_pad());
      for (const LoraRun& run : runs_) {
        if (run.lora != nullptr) project_gate_up(context_, routing_, run, x, chunk_.xa.data());
      }
    }
    if (args_.save && args_.keep_pre) chunk_.pre = Kept<uint16_t>(context_, slots() * 2 * i_pad);
    auto* h = op_.take<uint16_t>(slots() * i_pad);
    run_up_phase(context_, routing_, {&experts_, runs_, x, chunk_.xa.data(), h, chunk_.pre.data()});

    SlotProducts products;
    products.main = {rows_by_slot(op_, routing_, h, i_pad), experts_.down};
    const bool low_rank = adapter_ != nullptr && adapter_->has_down();
    if (low_rank && adapter_->shared_down_b) {
      for (const LoraRun& run : runs_) {
        if (run.lora != nullptr) sum_down_a(products.main.rows, run);
      }
    } else if (low_rank) {
      products.extras = multiply_down_a(products.main.rows);
    }
    TokenSum sum;
    sum.values = down(products);
    sum.ld = experts_.down.n_pad();
    sum.width = experts_.hidden;
    const int64_t element = chunk_.first_token * experts_.hidden;
    sum.out =
        static_cast<std::byte*>(args_.out) + element * (args_.out_dtype == Dtype::kBf16 ? 2 : 4);
    sum.dtype = args_.out_dtype;
    if (!low_rank || !adapter_->shared_down_b) {
      sum_tokens(context_, routing_, sum);
      return;
    }
    const int rank_pad = adapter_->down_rank_pad();
    const auto** rows = row_pointers(op_, chunk_.z.data(), routing_.num_tokens, rank_pad);
    for (const LoraRun& run : runs_) {
      sum.tokens = run.tokens;
      sum.low_rank = run.lora == nullptr ? Operand{} : Operand{rows, run.lora->down_b};
      sum.scale = run.lora == nullptr ? 1.0f : run.lora->scale;
      sum_tokens(context_, routing_, sum);
    }
  }

 private:
  int64_t slots() const { return routing_.num_slots(); }

  // z = h A^T of every slot, and what B makes of it.
  std::span<const SlotExtra> multiply_down_a(const uint16_t* const* h) {
    const int rank_pad = adapter_->down_rank_pad();
    chunk_.z = Kept<uint16_t>(context_, slots() * rank_pad);
    const auto** rows = rows_by_slot(op_, routing_, chunk_.z.data(), rank_pad);
    auto* extras = op_.take<SlotExtra>(runs_.size());
    size_t count = 0;
    for (const auto& [tokens, lora] : runs_) {
      if (lora == nullptr) continue;
      SlotProducts inner;
      inner.main = {h, lora->down_a};
      inner.tokens = tokens;
      multiply_slots_into(context_, routing_, inner, chunk_.z.data(), rank_pad, Dtype::kBf16);
      new (&extras[count++]) SlotExtra{tokens, {{rows, lora->down_b}, {}}, lora->scale};
    }
    return {extras, count};
  }

  // With one B for all experts the weighted sum z of h A^T comes before B: one product per token
  // instead of one per slot.
  void sum_down_a(const uint16_t* const* h, const LoraRun& run) {
    const int rank_pad = adapter_->down_rank_pad();
    if (chunk_.z.data() == nullptr) {
      chunk_.z = Kept<uint16_t>(context_, routing_.num_tokens * rank_pad);
      slot_z_ = op_.take<float>(slots() * rank_pad);
    }
    SlotProducts inner;
    inner.main = {h, run.lora->down_a};
    inner.tokens = run.tokens;
    multiply_slots_into(context_, routing_, inner, slot_z_, rank_pad, Dtype::kF32);
    TokenSum sum;
    sum.tokens = run.tokens;
    sum.values = slot_z_;
    sum.ld = sum.width = rank_pad;
    sum.out = chunk_.z.data();
    sum_tokens(context_, routing_, sum);
  }

  // The output of every slot: [S, H_pad] fp32.
  const float* down(const SlotProducts& products) {
    const KernelSet& kernels = context_.kernels();
    const int64_t ld = experts_.down.n_pad();
    auto* y = op_.take<float>(slots() * ld);
    const auto store = [&](const Product& product, int tile, float* c, int) {
      const int column = tile * kPanel;
      if (experts_.down_bias != nullptr) {
        kernels.add_bias(c, product.num_rows, experts_.down_bias + product.tag * ld + column);
      }
      kernels.store_tile(c, product.num_rows, kPanel, y + product.first * ld + column, ld,
                         Dtype::kF32);
    };
    multiply_slots(context_, routing_, products, store);
    return y;
  }

  Context& context_;
  Op op_;
  const ExpertsForward& args_;
  const Experts& experts_;
  SavedChunk& chunk_;
  const Routing& routing_;
  std::vector<LoraRun> runs_;            // of this chunk, counted from its first token
  const ExpertLora* adapter_ = nullptr;  // any one of them: the layout is the same for all
  float* slot_z_ = nullptr;              // [S, r_pad]
};

}  // namespace

std::unique_ptr<Saved> experts_forward(Context& context, const ExpertsForward& args) {
  const Experts& experts = *args.experts;
  check_ids(args.ids, args.num_tokens, args.top_k, experts.num_experts);
  auto saved = std::make_unique<Saved>();
  saved->num_tokens = args.num_tokens;
  saved->top_k = args.top_k;
  saved->keeps_pre = args.keep_pre;
  const int64_t most = chunk_tokens(experts, args.top_k);
  for (int64_t first = 0; first < args.num_tokens; first += most) {
    SavedChunk chunk;
    chunk.first_token = first;
    chunk.routing = route(args.ids + first * args.top_k, args.weights + first * args.top_k,
                          std::min(most, args.num_tokens - first), args.top_k, experts.num_experts);
    ForwardChunk(context, args, chunk).run();
    if (args.save) saved->chunks.push_back(std::move(chunk));
  }
  return args.save ? std::move(saved) : nullptr;
}

}  // namespace hetero
