// The thread pool by itself, so that ThreadSanitizer sees all of it: many jobs, parking between
// them, exceptions, callers that queue, pools that come and go, forks, pools inside pools.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"

namespace {

using hetero::ThreadPool;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Plain writes, one per index: a race in handing out indices or in the end of a job is a data race.
bool counts_right(ThreadPool& pool, int64_t n) {
  std::vector<int64_t> values(n, 0);
  pool.run(n, [&](int64_t index, int) { values[index] += index + 1; });
  return std::accumulate(values.begin(), values.end(), int64_t{0}) == n * (n + 1) / 2;
}

void many_jobs() {
  ThreadPool pool(4, {});
  for (int64_t n = 0; n < 3000; ++n) require(counts_right(pool, n % 67), "every index once");
}

void jobs_after_sleep() {
  ThreadPool pool(4, {});
  for (int i = 0; i < 40; ++i) {
    sleep_ms(i % 4);  // some jobs find the workers spinning, some asleep
    require(counts_right(pool, 33), "jobs after a pause");
  }
}

void scratch_per_thread() {
  ThreadPool pool(4, {});
  std::vector<int64_t> scratch(pool.num_threads(), 0);
  int64_t expected = 0;
  for (int job = 0; job < 500; ++job, expected += 64) {
    pool.run(64, [&](int64_t, int thread) { scratch[thread] += 1; });
  }
  require(std::accumulate(scratch.begin(), scratch.end(), int64_t{0}) == expected,
          "a thread's scratch is its own");
}

void exceptions_cancel() {
  ThreadPool pool(4, {});
  for (int job = 0; job < 300; ++job) {
    std::atomic<int> ran{0};
    bool thrown = false;
    try {
      pool.run(1000, [&](int64_t index, int) {
        ran.fetch_add(1, std::memory_order_relaxed);
        if (index == job % 50) throw std::runtime_error("task");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    require(thrown && ran <= 1000, "the exception of a task comes back");
    require(counts_right(pool, 17), "the pool works after an exception");
  }
}

void callers_queue() {
  ThreadPool pool(3, {});
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 300; ++job) require(counts_right(pool, 29), "callers that queue");
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void pools_come_and_go() {
  for (int i = 0; i < 100; ++i) {
    ThreadPool pool(1 + i % 5, {});
    if (i % 3 != 0) require(counts_right(pool, 21), "a short-lived pool");
    if (i % 7 == 0) sleep_ms(1);  // some die asleep
  }
}

void pools_inside_pools() {
  ThreadPool outer(3, {}), inner(2, {});
  std::vector<int64_t> sums(24, 0);
  for (int job = 0; job < 30; ++job) {
    outer.run(24, [&](int64_t index, int) {
      std::vector<int64_t> values(10, 0);
      inner.run(10, [&](int64_t i, int) { values[i] = i; });
      sums[index] += std::accumulate(values.begin(), values.end(), int64_t{0});
    });
  }
  for (int64_t sum : sums) require(sum == 30 * 45, "a task may use another pool");
}

// Strict tasks run on their own node alone, preferred ones wherever there is time; all run once.
void tasks_by_node() {
  for (int nodes = 1; nodes <= 4; ++nodes) {
    ThreadPool pool(5, {}, std::vector<hetero::Node>(nodes));
    require(pool.num_nodes() == nodes, "as many nodes as asked for");
    for (int job = 0; job < 300; ++job) {
      std::vector<int64_t> first(nodes + 1, 0);
      for (int node = 0; node < nodes; ++node)
        first[node + 1] = first[node] + (job + 7 * node) % 20;
      std::vector<int64_t> owner(first.back(), -1);
      const bool strict = job % 2 == 0;
      pool.run_by_node(first,
                       strict ? ThreadPool::Affinity::kStrict : ThreadPool::Affinity::kPreferred,
                       [&](int64_t index, int thread) { owner[index] = pool.node_of(thread); });
      for (int node = 0; node < nodes; ++node) {
        for (int64_t index = first[node]; index < first[node + 1]; ++index) {
          require(strict ? owner[index] == node : owner[index] >= 0, "a task on its node");
        }
      }
      require(counts_right(pool, job % 23), "plain jobs between");
      if (job % 50 == 0) sleep_ms(1);
    }
  }
  ThreadPool small(2, {}, std::vector<hetero::Node>(6));
  require(small.num_nodes() == 2, "no more nodes than threads");
}

std::atomic<int> entered{0}, left{0};

void hooks_pair() {
  {
    ThreadPool pool(4, {[] { entered.fetch_add(1); }, [] { left.fetch_add(1); }});
    for (int job = 0; job < 200; ++job) require(counts_right(pool, 40), "with hooks");
  }
  require(entered > 0 && entered == left, "every thread that entered a job has left it");
}

// Last, since a child of a threaded process may only do so much; ThreadSanitizer follows it too.
void children_have_their_own() {
  ThreadPool pool(4, {});
  require(counts_right(pool, 50), "before the fork");
  for (int i = 0; i < 3; ++i) {
    const pid_t child = fork();
    if (child == 0) _exit(counts_right(pool, 50) && counts_right(pool, 7) ? 0 : 1);
    int status = 0;
    require(waitpid(child, &status, 0) == child && status == 0, "a forked child");
    require(counts_right(pool, 50), "after the fork");
  }
}

}  // namespace

int main() {
  many_jobs();
  jobs_after_sleep();
  scratch_per_thread();
  exceptions_cancel();
  callers_queue();
  pools_come_and_go();
  pools_inside_pools();
  tasks_by_node();
  hooks_pair();
  children_have_their_own();
  std::puts("thread pool: all passed");
}
