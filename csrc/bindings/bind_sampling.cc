#include "bindings/bind.h"
#include "ops/sampling.h"

// Tensors go by address: see bind_rows.cc.
namespace hetero {
namespace {

using Address = uintptr_t;

template <class T>
T* to(Address address) {
  return reinterpret_cast<T*>(address);
}

TokenRows token_rows(Address logits, Address targets, Address temperature, int64_t rows, int n) {
  return {to<const float>(logits), to<const int64_t>(targets), to<const float>(temperature), rows,
          n};
}

}  // namespace

void bind_sampling(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  module.def(
      "cap_logits",
      [](Context& c, Address x, int64_t rows, int n, float factor, float softcap) {
        cap_logits(c, to<float>(x), rows, n, factor, softcap);
      },
      unlocked);
  module.def(
      "token_logprobs",
      [](Context& c, Address logits, Address targets, Address temperature, int64_t rows, int n,
         Address logp, Address entropy, Address max, Address inverse_total) {
        token_logprobs(c, token_rows(logits, targets, temperature, rows, n), to<float>(logp),
                       to<float>(entropy), to<float>(max), to<float>(inverse_total));
      },
      unlocked);
  module.def(
      "token_logprobs_backward",
      [](Context& c, Address logits, Address targets, Address temperature, int64_t rows, int n,
         Address max, Address inverse_total, Address gradient, float factor, float softcap,
         Address dlogits) {
        token_logprobs_backward(c, token_rows(logits, targets, temperature, rows, n),
                                to<const float>(max), to<const float>(inverse_total),
                                to<const float>(gradient), factor, softcap, to<uint16_t>(dlogits));
      },
      unlocked);
  module.def(
      "sample",
      [](Context& c, Address logits, int64_t rows, int n, Address temperature, Address top_p,
         Address top_k, Address min_p, Address keys, Address ids, Address logp, Address raw) {
        const SampleRows args{to<const float>(logits),
                              rows,
                              n,
                              to<const float>(temperature),
                              to<const float>(top_p),
                              to<const int32_t>(top_k),
                              to<const float>(min_p),
                              to<const uint64_t>(keys)};
        sample(c, args, to<int64_t>(ids), to<float>(logp), to<float>(raw));
      },
      unlocked);
}

}  // namespace hetero
