// ThreadPool: run(n, task) calls task(index, thread) for every index below n, on the caller and the
// workers.
//
// Indices are handed out one by one, so a thread that the system takes away delays only the task it
// holds. A worker that is late to a job never holds it up: the caller waits for tasks, not for
// threads. Workers spin for some 50 microseconds after a job and then sleep.
//
// Threads may be spread over the machine's memory nodes. run_by_node() prefers to give a thread
// the tasks of its own node, so that it reads memory that is near.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/topology.h"

namespace hetero {

// A reference to a callable (int64_t index, int thread); the callable must outlive the call it is
// passed to.
class TaskRef {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, TaskRef>>>
  TaskRef(F&& function)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(&function))),
        call_([](void* object, int64_t index, int thread) {
          (*static_cast<std::remove_reference_t<F>*>(object))(index, thread);
        }) {}
  void operator()(int64_t index, int thread) const { call_(object_, index, thread); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int);
};

class ThreadPool {
 public:
  // What a thread runs when it joins a job (`enter`) and when it leaves it (`leave`); either may be
  // null.
  struct Hooks {
    void (*enter)() = nullptr;
    void (*leave)() = nullptr;
  };

  // `nodes`: those that threads are spread over, in equal parts; no more than there are threads.
  // The workers of a node that has processors run on these only.
  ThreadPool(int num_threads, Hooks hooks, std::vector<Node> nodes = {Node{}});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  // The node of a thread; the caller's, thread 0, is that of node 0.
  int node_of(int thread) const { return thread * num_nodes() / num_threads_; }

  // Thread numbers are below num_threads(). The first exception that a task throws is thrown here
  // after all running tasks have ended; tasks not yet begun are skipped. One job at a time; calls
  // from several threads queue. Must not be called from inside a task. After fork() the child
  // starts its own workers.
  void run(int64_t num_tasks, TaskRef task);

  // Who runs the tasks of a node: its own threads before others, or its own threads alone.
  enum class Affinity { kPreferred, kStrict };

  // As run(), with the tasks of node n in [first[n], first[n + 1]); first begins with 0 and
  // may end before the last node. Fewer than 2^31 tasks.
  void run_by_node(std::span<const int64_t> first, Affinity affinity, TaskRef task);

 private:
  struct State;
  void start();
  void stop();
  void run_job(std::span<const int64_t> first, Affinity affinity, TaskRef task);

  int num_threads_;
  Hooks hooks_;
  std::vector<Node> nodes_;
  int owner_pid_ = 0;
  std::unique_ptr<State> state_;
};

}  // namespace hetero
