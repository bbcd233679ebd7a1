// Row operations over whole arrays: each row is computed by one thread, alone.
#pragma once

#include <algorithm>

#include "ops/context.h"

namespace hetero {

// body(row) for every row of n elements, some 16k elements per task.
template <class Body>
void for_rows(Context& context, int64_t rows, int64_t n, Body body) {
  const int64_t step = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, n));
  context.parallel((rows + step - 1) / step, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * step);
    for (int64_t row = task * step; row < end; ++row) body(row);
  });
}

void rms_norm(Context& context, const Norm& norm, const void* x, const void* weight, void* y,
              int64_t rows);
void rms_norm_backward(Context& context, const Norm& norm, const void* x, const void* weight,
                       const void* dy, void* dx, int64_t rows);

// Elementwise over n values of one dtype.
void activate(Context& context, Activation kind, const void* x, void* y, int64_t n, Dtype dtype);
void activate_backward(Context& context, Activation kind, const void* x, const void* dy, void* dx,
                       int64_t n, Dtype dtype);
void gate(Context& context, const Gate& kind, const void* gate, const void* up, void* out,
          int64_t n, Dtype dtype);
void gate_backward(Context& context, const Gate& kind, const void* gate, const void* up,
                   const void* dout, void* dgate, void* dup, int64_t n, Dtype dtype);

// x [rows, n] in `dtype`, y fp32.
void softmax(Context& context, const void* x, float* y, int64_t rows, int n, Dtype dtype);
void softmax_backward(Context& context, const float* y, const float* dy, void* dx, int64_t rows,
                      int n, Dtype dtype);

// ids [rows, k]: the k largest of each row of x, largest first, ties to the lower id, NaN last.
void topk(Context& context, const float* x, int64_t* ids, int64_t rows, int n, int k);

}  // namespace hetero
