// RowKernels: the vector functions of one instruction set that work on rows, not on matrices.
//
// Each treats a row alone, reduces in a fixed tree and ends with a masked tail that runs the same
// instructions, so the bits of a row depend on nothing but the row. Pointers need no alignment.
// bf16 is uint16_t.
#pragma once

#include <stdint.h>

namespace hetero {

enum class Dtype : int { kF32, kBf16 };

// kSwigluOss exists only in the gated form: gate sigmoid(alpha gate) (up + 1).
enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kSigmoid, kSwigluOss };

struct Gate {
  Activation kind = Activation::kSilu;
  bool clamp = false;  // gate to at most limit, up to [-limit, limit]
  float limit = 0.0f;
  float alpha = 1.702f;
};

struct Norm {
  int n = 0;
  float eps = 0.0f;
  float offset = 0.0f;
  bool round_first = true;  // round the normalised row to the dtype of x before the weight
  Dtype x = Dtype::kBf16;
  Dtype weight = Dtype::kBf16;
};

// Scores of one attention tile: s [rows][32] raw dot products; row r sees the columns lo[r] to
// hi[r] - 1.
struct Scores {
  int rows = 0;
  const int32_t* lo = nullptr;
  const int32_t* hi = nullptr;
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
};

// One row of logits at a temperature: z = (logit - max) / temperature.
struct LogitRow {
  int n = 0;
  float max = 0.0f;
  float inverse_temperature = 1.0f;
};

constexpr int kSumBlock = 512;  // logits per partial sum

}  // namespace hetero
