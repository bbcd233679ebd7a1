// Context: what every op is given: threads, the kernels of one ISA, and scratch memory.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "cpu/thread_pool.h"
#include "kernels/kernel.h"

namespace hetero {

class Context {
 public:
  // num_threads 0: one per usable physical core. isa "": HETERO_ISA, else the best one. num_nodes
  // 0: HETERO_NUMA_NODES, else the machine's memory nodes; other numbers divide the threads as if
  // there were so many.
  explicit Context(int num_threads = 0, const std::string& isa = "", int num_nodes = 0);

  const KernelSet& kernels() const { return kernels_; }
  int num_threads() const { return pool_.num_threads(); }
  int num_nodes() const { return pool_.num_nodes(); }
  const std::shared_ptr<BufferPool>& buffers() const { return buffers_; }
  void parallel(int64_t num_tasks, TaskRef task) { pool_.run(num_tasks, task); }
  // Tasks with a node each: those of node n are [first[n], first[n + 1]).
  void parallel_by_node(std::span<const int64_t> first, TaskRef task) {
    pool_.run_by_node(first, ThreadPool::Affinity::kPreferred, task);
  }
  // task(matrix, panel, thread) for every panel of a stack of packed matrices, by the threads of
  // the panel's node: what touches a page first decides where it lies.
  template <class Task>
  void place_panels(int64_t matrices, int panels, Task task);

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

// Panels p of `panels` that belong to node n: [node_begin(panels, n, nodes), node_begin(.., n + 1,
// ..)). Every matrix is cut alike, so that one busy expert keeps all nodes busy.
inline int node_begin(int panels, int node, int nodes) {
  return static_cast<int>(static_cast<int64_t>(panels) * node / nodes);
}

template <class Task>
void Context::place_panels(int64_t matrices, int panels, Task task) {
  const int nodes = num_nodes();
  std::vector<int64_t> first(nodes + 1, 0);
  for (int node = 0; node <= nodes; ++node) {
    first[node] = matrices * node_begin(panels, node, nodes);
  }
  const auto place = [&](int64_t index, int thread) {
    const int node =
        static_cast<int>(std::upper_bound(first.begin(), first.end(), index) - first.begin()) - 1;
    const int begin = node_begin(panels, node, nodes);
    const int own = node_begin(panels, node + 1, nodes) - begin;
    const int64_t at = index - first[node];
    task(at / own, begin + static_cast<int>(at % own), thread);
  };
  pool_.run_by_node(first, ThreadPool::Affinity::kStrict, place);
}

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
