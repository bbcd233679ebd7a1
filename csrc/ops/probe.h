// What the machine gives at most: the two limits that a measured op is compared with.
#pragma once

#include "ops/context.h"

namespace hetero {

// Reads `bytes` bytes (a multiple of 64) once, every thread a stretch of its own at a time, as the
// packed experts are read. Returns the exclusive or of all 64-bit words, so that none can be
// skipped.
uint64_t read_stream(Context& context, const void* data, int64_t bytes);

// Runs `rounds` rounds of the ISA's multiply-adds on every thread; returns the floating-point
// operations.
double run_multiply_adds(Context& context, int64_t rounds);

}  // namespace hetero
