// Buffer: an aligned piece of memory. Arena: scratch that an op takes pieces from. BufferPool:
// buffers that outlive an op and come back.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace hetero {

// Under AddressSanitizer every piece is a block of its own and of just its size, so that one byte
// past its end is found.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kExactSizes = true;
#else
inline constexpr bool kExactSizes = false;
#endif

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) {
    // Big blocks are aligned to and backed by huge pages: panels are walked with one TLB miss per 2
    // MiB.
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    size_ = kExactSizes ? bytes : (bytes + alignment - 1) / alignment * alignment;
    if (size_ == 0) return;
    void* data = nullptr;
    if (posix_memalign(&data, alignment, size_) != 0) throw std::bad_alloc();
    data_ = static_cast<std::byte*>(data);
    if (alignment == kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A stack of pieces. After `reset` the blocks are merged into one that holds the most ever needed,
// so that in the steady state an op allocates nothing.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    return reinterpret_cast<T*>(take_bytes(count * sizeof(T)));
  }

  void reset() {
    if (kExactSizes) blocks_.clear();
    if (blocks_.size() > 1) {
      size_t total = 0;
      for (const Buffer& block : blocks_) total += block.size();
      blocks_.clear();
      blocks_.emplace_back(total);
    }
    used_ = 0;
  }

 private:
  std::byte* take_bytes(size_t bytes) {
    if (kExactSizes) {
      blocks_.emplace_back(bytes > 0 ? bytes : 1);
      return blocks_.back().data();
    }
    bytes = (bytes + 63) / 64 * 64;
    if (blocks_.empty() || used_ + bytes > blocks_.back().size()) {
      const size_t least = size_t{1} << 20;
      blocks_.emplace_back(bytes > least ? bytes : least);
      used_ = 0;
    }
    std::byte* piece = blocks_.back().data() + used_;
    used_ += bytes;
    return piece;
  }

  std::vector<Buffer> blocks_;
  size_t used_ = 0;  // bytes taken from the last block
};

// Keeps returned buffers for the next taker: the pages of a training step are mapped and cleared
// once.
class BufferPool {
 public:
  Buffer take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t best = free_.size();
    for (size_t i = 0; i < free_.size(); ++i) {
      const bool fits = free_[i].size() >= bytes && free_[i].size() <= 2 * bytes;
      if (fits && (best == free_.size() || free_[i].size() < free_[best].size())) best = i;
    }
    if (best == free_.size()) return Buffer(bytes);
    Buffer found = std::move(free_[best]);
    free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
    return found;
  }

  void give(Buffer buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (buffer.size() > 0 && !kExactSizes) free_.push_back(std::move(buffer));
    // Sizes that nobody asks for any more must not pile up.
    constexpr size_t kMostFree = 256;
    if (free_.size() > kMostFree) free_.erase(free_.begin());
  }

 private:
  std::mutex mutex_;
  std::vector<Buffer> free_;
};

}  // namespace hetero
