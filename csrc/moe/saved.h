// What a forward keeps for its backward. It belongs to the caller, so any number of them may be
// alive, and they may be used in any order, more than once.
#pragma once

#include <memory>
#include <vector>

#include "base/buffer.h"
#include "moe/experts.h"
#include "moe/routing.h"

namespace hetero {

// Values that outlive the op; their memory returns to the context's pool.
template <class T>
class Kept {
 public:
  Kept() = default;
  Kept(Context& context, size_t count)
      : pool_(context.buffers()), buffer_(pool_->take(count * sizeof(T))) {}
  Kept(Kept&&) noexcept = default;
  Kept& operator=(Kept&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(buffer_, other.buffer_);
    return *this;
  }
  ~Kept() {
    if (pool_ != nullptr) pool_->give(std::move(buffer_));
  }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }

 private:
  std::shared_ptr<BufferPool> pool_;
  Buffer buffer_;
};

// A run of tokens that is computed together; scratch memory is bounded by its size.
struct SavedChunk {
  int64_t first_token = 0;
  Routing routing;
  Kept<uint16_t>
      pre;  // [S, 2 I_pad] bf16: gate and up before the activation; empty: recomputed by backward
  Kept<uint16_t> xa;  // gate_up LoRA: x A^T, [T, 2 r_pad] (shared) or [S, 2 r_pad]
  Kept<uint16_t>
      z;  // down LoRA: weighted sum of h A^T per token [T, r_pad] (shared), or h A^T [S, r_pad]
};

struct Saved {
  Saved() = default;
  Saved(const Saved&) = delete;
  Saved& operator=(const Saved&) = delete;

  std::vector<SavedChunk> chunks;
  int64_t num_tokens = 0;
  int top_k = 0;
  bool keeps_pre = false;
};

}  // namespace hetero
