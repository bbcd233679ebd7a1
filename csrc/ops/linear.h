// y = x W^T (+ bias) (+ scale (x A^T) B^T) and its gradients; W is frozen.
#pragma once

#include "ops/product.h"

namespace hetero {

// LoRA of rows [first, first + num_rows): a is [r, K], b is [N, r]. The rows x A^T are rounded to
// bf16 and kept for backward: xa [num_rows, r_pad], r_pad being r rounded up to 32.
struct LowRank {
  Matrix a, b;
  float scale = 1.0f;
  uint16_t* xa = nullptr;
  int64_t first = 0;
  int64_t num_rows = 0;
};

struct Linear {
  const uint16_t* x = nullptr;    // [T, K] bf16
  int64_t num_rows = 0;           // T
  Matrix weight;                  // [N, K]
  const float* bias = nullptr;    // [N] or null
  std::span<const LowRank> lora;  // of runs of rows that do not overlap
  void* out = nullptr;            // [T, N]
  Dtype out_dtype = Dtype::kBf16;
};

void linear(Context& context, const Linear& args);

struct LinearBackward {
  const uint16_t* dout = nullptr;  // [T, N] bf16
  int64_t num_rows = 0;
  Matrix weight;
  const LowRank* lora = nullptr;  // of all rows, with the xa of forward
  const uint16_t* x = nullptr;    // [T, K], for da
  void* dx = nullptr;             // [T, K] or null
  Dtype dx_dtype = Dtype::kBf16;
  float* da = nullptr;  // [r, K] or null: added to
  float* db = nullptr;  // [N, r] or null: added to
};

void linear_backward(Context& context, const LinearBackward& args);

// Rows times one matrix (+ extras) (+ bias), into out.
struct RowJob {
  Operand main;
  std::span<const Extra> extras;
  int64_t num_rows = 0;
  Direction direction = Direction::kForward;
  const float* bias = nullptr;  // [width]
  void* out = nullptr;          // [num_rows, width], rows ld elements apart
  int64_t ld = 0;
  int width = 0;
  Dtype dtype = Dtype::kBf16;
};

void multiply_rows(Context& context, const RowJob& job);

// Pointers to `count` rows that lie `stride` elements apart, taken from the op's scratch.
const uint16_t** row_pointers(Op& op, const uint16_t* first, int64_t count, int64_t stride);

}  // namespace hetero
