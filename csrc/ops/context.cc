#include "ops/context.h"

#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "base/check.h"
#include "cpu/topology.h"
#include "kernels/select.h"

namespace hetero {

namespace {

// Parts of the machine that threads are divided into.
std::vector<Node> nodes_of(int num_nodes) {
  if (num_nodes > 0) return std::vector<Node>(num_nodes);
  const char* text = std::getenv("HETERO_NUMA_NODES");
  if (text == nullptr || *text == '\0') return memory_nodes();
  char* end = nullptr;
  const long wanted = std::strtol(text, &end, 10);
  HETERO_CHECK(*end == '\0' && wanted >= 1 && wanted <= 64, "HETERO_NUMA_NODES is '", text,
               "'; expected a number from 1 to 64, or nothing for the machine's own memory nodes");
  return std::vector<Node>(wanted);
}

}  // namespace

Context::Context(int num_threads, const std::string& isa, int num_nodes)
    : kernels_(select_kernels(isa)),
      pool_(num_threads > 0 ? num_threads : usable_cores(), {kernels_.enter, kernels_.leave},
            nodes_of(num_nodes)),
      owner_pid_(getpid()),
      mutex_(std::make_unique<std::recursive_mutex>()) {}

std::recursive_mutex& Context::mutex() {
  if (owner_pid_ != getpid()) {
    // A forked child: a thread of the parent may have held the lock, and that thread does not exist
    // here.
    static_cast<void>(mutex_.release());
    mutex_ = std::make_unique<std::recursive_mutex>();
    depth_ = 0;
    owner_pid_ = getpid();
  }
  return *mutex_;
}

}  // namespace hetero
