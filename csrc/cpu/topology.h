// How many threads are worth running here, and how big the caches are.
#pragma once

#include <cstddef>
#include <vector>

namespace hetero {

// Physical cores in the affinity mask of the calling thread, no more than the cgroup's CPU quota;
// at least 1.
int usable_cores();

// A memory node, or a part of the machine that is treated as one.
struct Node {
  std::vector<int> cpus;  // empty: its threads may run anywhere
};

// The memory nodes that have processors in the affinity mask of the calling thread. A machine with
// one, or that does not say, gives one node without processors.
std::vector<Node> memory_nodes();

// Keeps the calling thread on the processors of `node`, if it names any and the system allows it.
void bind_thread(const Node& node);

// The same for as long as it lives.
class BoundThread {
 public:
  explicit BoundThread(const Node& node);
  ~BoundThread();
  BoundThread(const BoundThread&) = delete;
  BoundThread& operator=(const BoundThread&) = delete;

 private:
  std::vector<int> before_;
};

// Bytes of the second-level cache of one core; 1 MiB when the system does not say.
size_t l2_bytes();

}  // namespace hetero
