#include "moe/phases.h"

#include "ops/linear.h"

namespace hetero {

void multiply_slots_into(Context& context, const Routing& routing, const SlotProducts& products,
                         void* out, int64_t ld, Dtype dtype) {
  const KernelSet& kernels = context.kernels();
  const auto store = [&](const Product& product, int tile, float* c, int) {
    auto* to = static_cast<std::byte*>(out) +
               (product.first * ld + tile * kPanel) * (dtype == Dtype::kBf16 ? 2 : 4);
    kernels.store_tile(c, product.num_rows, kPanel, to, ld, dtype);
  };
  multiply_slots(context, routing, products, store);
}

void project_gate_up(Context& context, const Routing& routing, const LoraRun& run,
                     const uint16_t* x, uint16_t* xa) {
  Op op(context);
  const Matrix& a = run.lora->gate_up_a;
  if (run.lora->shared_gate_up_a) {
    const int64_t first = run.tokens.first, tokens = run.tokens.end - first;
    RowJob job;
    job.main = {row_pointers(op, x + first * a.k, tokens, a.k), a};
    job.num_rows = tokens;
    job.out = xa + first * a.n_pad();
    job.ld = job.width = a.n_pad();
    multiply_rows(context, job);
    return;
  }
  SlotProducts products;
  products.main = {rows_by_token(op, routing, x, a.k), a};
  products.tokens = run.tokens;
  multiply_slots_into(context, routing, products, xa, a.n_pad(), Dtype::kBf16);
}

void run_up_phase(Context& context, const Routing& routing, const UpPhase& phase) {
  const Experts& experts = *phase.experts;
  const KernelSet& kernels = context.kernels();
  Op op(context);
  SlotProducts products;
  products.main = {rows_by_token(op, routing, phase.x, experts.hidden), experts.gate_up};
  products.group = 2;
  auto* extras = op.take<SlotExtra>(phase.lora.size());
  size_t num_extras = 0;
  for (const auto& [tokens, lora] : phase.lora) {
    if (lora == nullptr || !lora->has_gate_up()) continue;
    const int rank_pad = lora->gate_up_rank_pad();
    SlotExtra& extra = *new (&extras[num_extras++]) SlotExtra{tokens, {}, lora->scale};
    for (int i = 0; i < 2; ++i) {
      const uint16_t* half = phase.xa + i * rank_pad;
      const auto** rows = lora->shared_gate_up_a ? rows_by_token(op, routing, half, 2 * rank_pad)
                                                 : rows_by_slot(op, routing, half, 2 * rank_pad);
      extra.operand[i] = {rows, lora->gate_up_b};
    }
  }
  products.extras = {extras, num_extras};
  const int i_pad = experts.i_pad();
  const auto activate = [&](const Product& product, int tile, float* c, int) {
    const int rows = product.num_rows, column = tile * kPanel;
    float* gate = c;
    float* up = c + rows * kPanel;
    if (experts.gate_up_bias != nullptr) {
      const float* bias =
          experts.gate_up_bias + static_cast<size_t>(product.tag) * 2 * i_pad + column;
      kernels.add_bias(gate, rows, bias);
      kernels.add_bias(up, rows, bias + i_pad);
    }
    if (phase.pre != nullptr) {
      uint16_t* pre = phase.pre + static_cast<size_t>(product.first) * 2 * i_pad + column;
      kernels.store_tile(gate, rows, kPanel, pre, 2 * i_pad, Dtype::kBf16);
      kernels.store_tile(up, rows, kPanel, pre + i_pad, 2 * i_pad, Dtype::kBf16);
    }
    if (phase.h == nullptr) return;
    kernels.gate(experts.gate, gate, up, gate, rows * kPanel, Dtype::kF32, Dtype::kF32);
    uint16_t* h = phase.h + static_cast<size_t>(product.first) * i_pad + column;
    kernels.store_tile(gate, rows, kPanel, h, i_pad, Dtype::kBf16);
  };
  multiply_slots(context, routing, products, activate);
}

}  // namespace hetero
