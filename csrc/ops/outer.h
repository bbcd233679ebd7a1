// Weight gradients of low-rank factors: sums of outer products over rows, in fp32 and in row order.
#pragma once

#include <span>

#include "ops/context.h"

namespace hetero {

// out(i, j) += scale * sum over rows of left[row][i] * right[row][j], i < m, j < n, with out(i, j)
// at out[i * stride_i + j * stride_j]. m is small (a rank), n is large.
struct OuterSum {
  const uint16_t* const* left = nullptr;
  const uint16_t* const* right = nullptr;
  int num_rows = 0;
  float* out = nullptr;
};

struct OuterShape {
  int m = 0;
  int n = 0;
  float scale = 1.0f;
  int64_t stride_i = 0;
  int64_t stride_j = 0;
};

void add_outer_sums(Context& context, std::span<const OuterSum> sums, const OuterShape& shape);

}  // namespace hetero
