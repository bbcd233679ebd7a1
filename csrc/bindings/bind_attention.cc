#include "bindings/bind.h"
#include "ops/attention.h"

// Tensors go by address: see bind_rows.cc.
namespace hetero {
namespace {

using Address = uintptr_t;

template <class T>
T* to(Address address) {
  return reinterpret_cast<T*>(address);
}

HeadRows head_rows(Address data, int64_t row_stride, int64_t head_stride) {
  return {to<const uint16_t>(data), row_stride, head_stride};
}

}  // namespace

void bind_attention(nb::module_& module) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<HeadRows>(module, "HeadRows")
      .def("__init__", [](HeadRows* rows, Address data, int64_t row_stride, int64_t head_stride) {
        new (rows) HeadRows(head_rows(data, row_stride, head_stride));
      });
  nb::class_<AttentionShape>(module, "AttentionShape")
      .def(nb::init<int64_t, int64_t, int, int, int, int>());
  nb::class_<AttentionParams>(module, "AttentionParams")
      .def("__init__",
           [](AttentionParams* params, float scale, int window, float softcap, Address sinks) {
             new (params) AttentionParams{scale, window, softcap, to<const float>(sinks)};
           });
  nb::class_<Segments>(module, "Segments")
      .def("__init__", [](Segments* segments, int count, Address q_start, Address kv_len) {
        new (segments) Segments{count, to<const int32_t>(q_start), to<const int32_t>(kv_len)};
      });
  module.def(
      "attention",
      [](Context& c, const AttentionShape& shape, HeadRows q, HeadRows k, HeadRows v,
         const Segments& segments, Address kv_rows, Address kv_start, int64_t num_rows,
         const AttentionParams& params, Address out, Address lse) {
        const TrainingRows rows{to<const int32_t>(kv_rows), to<const int32_t>(kv_start)};
        check_segments(shape, segments);
        check_training(shape, segments, rows, num_rows);
        attention(c, shape, q, k, v, segments, rows, params, to<uint16_t>(out), to<float>(lse));
      },
      unlocked);
  module.def(
      "attention_backward",
      [](Context& c, const AttentionShape& shape, HeadRows q, HeadRows k, HeadRows v, Address out,
         Address lse, HeadRows dout, const Segments& segments, Address kv_rows, Address kv_start,
         const AttentionParams& params, Address dq, Address dk, Address dv) {
        attention_backward(c, shape, q, k, v, to<const uint16_t>(out), to<const float>(lse), dout,
                           segments, {to<const int32_t>(kv_rows), to<const int32_t>(kv_start)},
                           params, to<uint16_t>(dq), to<uint16_t>(dk), to<uint16_t>(dv));
      },
      unlocked);
  module.def(
      "paged_attention",
      [](Context& c, const AttentionShape& shape, HeadRows q, const Segments& segments,
         Address k_pool, Address v_pool, int64_t num_blocks, Address tables, int64_t stride,
         const AttentionParams& params, Address out) {
        const KvBlocks kv{to<const uint16_t>(k_pool), to<const uint16_t>(v_pool),
                          to<const int32_t>(tables), nullptr, stride};
        check_segments(shape, segments);
        check_paged(segments, kv, params.window, num_blocks);
        attend_blocks(c, shape, q, segments, kv, params, to<uint16_t>(out), nullptr);
      },
      unlocked);
  module.def(
      "write_kv",
      [](Context& c, const AttentionShape& shape, HeadRows k, HeadRows v, Address slots,
         Address k_pool, Address v_pool, int64_t num_blocks) {
        check_slots(to<const int64_t>(slots), shape.kv_tokens, num_blocks);
        write_kv(c, k, v, to<const int64_t>(slots), shape.kv_tokens, shape.kv_heads, shape.dim,
                 shape.v_dim, to<uint16_t>(k_pool), to<uint16_t>(v_pool));
      },
      unlocked);
}

}  // namespace hetero
