#include "ops/probe.h"

#include <algorithm>
#include <atomic>

namespace hetero {
namespace {

constexpr int64_t kLine = 64;

// Eight words a line in eight chains: the loop waits for memory, never for itself.
uint64_t fold(const uint64_t* words, int64_t num_lines) {
  constexpr int kWords = kLine / sizeof(uint64_t);
  uint64_t folded[kWords] = {};
  for (int64_t line = 0; line < num_lines; ++line, words += kWords) {
    // The next page: the hardware's prefetcher stops at the end of one.
    __builtin_prefetch(words + 4096 / sizeof(uint64_t));
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) folded[i] ^= words[i];
  }
  uint64_t all = 0;
  for (uint64_t word : folded) all ^= word;
  return all;
}

}  // namespace

uint64_t read_stream(Context& context, const void* data, int64_t bytes) {
  Op op(context);
  constexpr int64_t kStretch = int64_t{1} << 20;
  std::atomic<uint64_t> all{0};
  context.parallel((bytes + kStretch - 1) / kStretch, [&](int64_t index, int) {
    const int64_t begin = index * kStretch, size = std::min(kStretch, bytes - begin);
    const auto* words =
        reinterpret_cast<const uint64_t*>(static_cast<const std::byte*>(data) + begin);
    all.fetch_xor(fold(words, size / kLine), std::memory_order_relaxed);
  });
  return all;
}

double run_multiply_adds(Context& context, int64_t rounds) {
  Op op(context);
  // Many tasks per thread: one that the system interrupts leaves the others to the rest.
  constexpr int64_t kTasks = 16;
  const int64_t num_tasks = kTasks * context.num_threads();
  double* flops = op.take<double>(num_tasks);
  context.parallel(num_tasks, [&](int64_t index, int) {
    flops[index] = context.kernels().multiply_add_peak(rounds / kTasks);
  });
  double total = 0.0;
  for (int64_t i = 0; i < num_tasks; ++i) total += flops[i];
  return total;
}

}  // namespace hetero
