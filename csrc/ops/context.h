// Context: what every op is given: threads, the kernels of one ISA, and scratch memory.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "base/buffer.h"
#include "cpu/thread_pool.h"
#include "kernels/kernel.h"

namespace hetero {

class Context {
 public:
  // num_threads 0: one per usable physical core. isa "": HETERO_ISA, else the best one.
  explicit Context(int num_threads = 0, const std::string& isa = "");

  const KernelSet& kernels() const { return kernels_; }
  int num_threads() const { return pool_.num_threads(); }
  const std::shared_ptr<BufferPool>& buffers() const { return buffers_; }
  void parallel(int64_t num_tasks, TaskRef task) { pool_.run(num_tasks, task); }

 private:
  friend class Op;
  std::recursive_mutex& mutex();

  const KernelSet& kernels_;
  ThreadPool pool_;
  Arena arena_;
  std::shared_ptr<BufferPool> buffers_ = std::make_shared<BufferPool>();
  int depth_ = 0;
  int owner_pid_;
  std::unique_ptr<std::recursive_mutex> mutex_;
};

// One running op: while it lives, the context is its own and what it takes stays valid. An op may
// call another.
class Op {
 public:
  explicit Op(Context& context) : context_(context), lock_(context.mutex()) { ++context_.depth_; }
  ~Op() {
    if (--context_.depth_ == 0) context_.arena_.reset();
  }
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  // Uninitialised, 64-byte aligned scratch for `count` values, valid until the outermost op ends.
  template <class T>
  T* take(size_t count) {
    return context_.arena_.take<T>(count);
  }

 private:
  Context& context_;
  std::unique_lock<std::recursive_mutex> lock_;
};

}  // namespace hetero
