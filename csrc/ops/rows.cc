#include "ops/rows.h"

#include <limits>

namespace hetero {
namespace {

size_t width(Dtype dtype) { return dtype == Dtype::kBf16 ? 2 : 4; }

const void* at(const void* base, size_t bytes) { return static_cast<const char*>(base) + bytes; }
void* at(void* base, size_t bytes) { return static_cast<char*>(base) + bytes; }

// body(byte offset, count) over pieces of a flat array.
template <class Body>
void for_pieces(Context& context, int64_t n, Dtype dtype, Body body) {
  constexpr int64_t kPiece = 8192;
  context.parallel((n + kPiece - 1) / kPiece, [&](int64_t task, int) {
    const int64_t first = task * kPiece;
    body(static_cast<size_t>(first) * width(dtype), static_cast<int>(std::min(kPiece, n - first)));
  });
}

// Keeps the k best so far in order; a later equal value goes behind.
void topk_row(const float* x, int n, int k, float* values, int64_t* ids) {
  int kept = 0;
  for (int i = 0; i < n; ++i) {
    const float value = x[i] == x[i] ? x[i] : -std::numeric_limits<float>::infinity();
    if (kept == k && !(value > values[k - 1])) continue;
    int place = kept < k ? kept++ : k - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = i;
  }
}

}  // namespace

void rms_norm(Context& context, const Norm& norm, const void* x, const void* weight, void* y,
              int64_t rows) {
  const size_t bytes = width(norm.x) * norm.n;
  for_rows(context, rows, norm.n, [&](int64_t row) {
    context.kernels().rms_norm(norm, at(x, row * bytes), weight, at(y, row * bytes));
  });
}

void rms_norm_backward(Context& context, const Norm& norm, const void* x, const void* weight,
                       const void* dy, void* dx, int64_t rows) {
  const size_t bytes = width(norm.x) * norm.n;
  for_rows(context, rows, norm.n, [&](int64_t row) {
    const size_t offset = row * bytes;
    context.kernels().rms_norm_backward(norm, at(x, offset), weight, at(dy, offset),
                                        at(dx, offset));
  });
}

void activate(Context& context, Activation kind, const void* x, void* y, int64_t n, Dtype dtype) {
  for_pieces(context, n, dtype, [&](size_t offset, int count) {
    context.kernels().activate(kind, at(x, offset), at(y, offset), count, dtype);
  });
}

void activate_backward(Context& context, Activation kind, const void* x, const void* dy, void* dx,
                       int64_t n, Dtype dtype) {
  for_pieces(context, n, dtype, [&](size_t offset, int count) {
    context.kernels().activate_backward(kind, at(x, offset), at(dy, offset), at(dx, offset), count,
                                        dtype);
  });
}

void gate(Context& context, const Gate& kind, const void* gate, const void* up, void* out,
          int64_t n, Dtype dtype) {
  for_pieces(context, n, dtype, [&](size_t offset, int count) {
    context.kernels().gate(kind, at(gate, offset), at(up, offset), at(out, offset), count, dtype,
                           dtype);
  });
}

void gate_backward(Context& context, const Gate& kind, const void* gate, const void* up,
                   const void* dout, void* dgate, void* dup, int64_t n, Dtype dtype) {
  for_pieces(context, n, dtype, [&](size_t offset, int count) {
    context.kernels().gate_backward(kind, at(gate, offset), at(up, offset), at(dout, offset),
                                    at(dgate, offset), at(dup, offset), count, dtype, dtype);
  });
}

void softmax(Context& context, const void* x, float* y, int64_t rows, int n, Dtype dtype) {
  for_rows(context, rows, n, [&](int64_t row) {
    context.kernels().softmax(at(x, row * n * width(dtype)), y + row * n, n, dtype);
  });
}

void softmax_backward(Context& context, const float* y, const float* dy, void* dx, int64_t rows,
                      int n, Dtype dtype) {
  for_rows(context, rows, n, [&](int64_t row) {
    context.kernels().softmax_backward(y + row * n, dy + row * n, at(dx, row * n * width(dtype)), n,
                                       dtype);
  });
}

void topk(Context& context, const float* x, int64_t* ids, int64_t rows, int n, int k) {
  Op op(context);
  float* values = op.take<float>(static_cast<size_t>(rows) * k);
  for_rows(context, rows, n,
           [&](int64_t row) { topk_row(x + row * n, n, k, values + row * k, ids + row * k); });
}

}  // namespace hetero
