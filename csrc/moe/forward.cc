#include <algorithm>

#include "base/check.h"
#include "moe/layer.h"
#include "moe/phases.h"

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
        routing_(chunk.routing) {}

  void run() {
    const int i_pad = experts_.i_pad();
    const uint16_t* x = args_.x + chunk_.first_token * experts_.hidden;
    const bool low_rank_up = args_.lora != nullptr && args_.lora->has_gate_up();
    if (low_rank_up) {
      const int64_t rows = args_.lora->shared_gate_up_a ? routing_.num_tokens : slots();
      chunk_.xa = Kept<uint16_t>(context_, rows * 2 * args_.lora->gate_up_rank_pad());
      project_gate_up(context_, routing_, *args_.lora, x, chunk_.xa.data());
    }
    if (args_.save && args_.keep_pre) chunk_.pre = Kept<uint16_t>(context_, slots() * 2 * i_pad);
    auto* h = op_.take<uint16_t>(slots() * i_pad);
    run_up_phase(
        context_, routing_,
        {&experts_, args_.lora, x, low_rank_up ? chunk_.xa.data() : nullptr, h, chunk_.pre.data()});

    SlotProducts products;
    products.main = {rows_by_slot(op_, routing_, h, i_pad), experts_.down};
    TokenSum sum;
    if (args_.lora != nullptr && args_.lora->has_down()) add_down_lora(products, sum);
    sum.values = down(products);
    sum.ld = experts_.down.n_pad();
    sum.width = experts_.hidden;
    const int64_t element = chunk_.first_token * experts_.hidden;
    sum.out =
        static_cast<std::byte*>(args_.out) + element * (args_.out_dtype == Dtype::kBf16 ? 2 : 4);
    sum.dtype = args_.out_dtype;
    sum_tokens(context_, routing_, sum);
  }

 private:
  int64_t slots() const { return routing_.num_slots(); }

  // With one B for all experts the weighted sum comes before B: one product per token instead of
  // one per slot.
  void add_down_lora(SlotProducts& products, TokenSum& sum) {
    const ExpertLora& lora = *args_.lora;
    const int rank_pad = lora.down_rank_pad();
    SlotProducts inner;
    inner.main = {products.main.rows, lora.down_a};
    if (!lora.shared_down_b) {
      chunk_.z = Kept<uint16_t>(context_, slots() * rank_pad);
      multiply_slots_into(context_, routing_, inner, chunk_.z.data(), rank_pad, Dtype::kBf16);
      products.extra[0] = {rows_by_slot(op_, routing_, chunk_.z.data(), rank_pad), lora.down_b};
      products.scale = lora.scale;
      return;
    }
    auto* z = op_.take<float>(slots() * rank_pad);
    multiply_slots_into(context_, routing_, inner, z, rank_pad, Dtype::kF32);
    chunk_.z = Kept<uint16_t>(context_, routing_.num_tokens * rank_pad);
    TokenSum inner_sum;
    inner_sum.values = z;
    inner_sum.ld = inner_sum.width = rank_pad;
    inner_sum.out = chunk_.z.data();
    sum_tokens(context_, routing_, inner_sum);
    auto** rows = op_.take<const uint16_t*>(routing_.num_tokens);
    for (int64_t token = 0; token < routing_.num_tokens; ++token) {
      rows[token] = chunk_.z.data() + token * rank_pad;
    }
    sum.low_rank = {rows, lora.down_b};
    sum.scale = lora.scale;
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
