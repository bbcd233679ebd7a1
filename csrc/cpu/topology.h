// How many threads are worth running here, and how big the caches are.
#pragma once

#include <cstddef>

namespace hetero {

// Physical cores in the affinity mask of the calling thread, no more than the cgroup's CPU quota;
// at least 1.
int usable_cores();

// Bytes of the second-level cache of one core; 1 MiB when the system does not say.
size_t l2_bytes();

}  // namespace hetero
