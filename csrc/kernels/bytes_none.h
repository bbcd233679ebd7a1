// Bytes for kernels that multiply bf16 weights: none.
#pragma once

namespace hetero {
namespace {

struct Bytes {
  static constexpr int kTogether = 0;
};

}  // namespace
}  // namespace hetero
