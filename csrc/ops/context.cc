#include "ops/context.h"

#include <unistd.h>

#include "cpu/topology.h"
#include "kernels/select.h"

namespace hetero {

Context::Context(int num_threads, const std::string& isa)
    : kernels_(select_kernels(isa)),
      pool_(num_threads > 0 ? num_threads : usable_cores(), {kernels_.enter, kernels_.leave}),
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
