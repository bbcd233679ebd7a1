#include "cpu/thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace hetero {
namespace {

// While a thread works on a job, its floating-point state is the job's, whatever the caller or a
// library has set: nearest-even rounding, no exceptions, and denormals count as zero. AMX and
// AVX512-BF16 know no denormals anyway, and a vector that meets one costs a hundred times as much.
class FloatState {
 public:
#if defined(__x86_64__)
  FloatState() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~FloatState() { _mm_setcsr(before_); }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
  unsigned before_;
#endif
};

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4, "a futex is 32 bits wide");

void futex_wait(Word& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(Word& word, int count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spins until `ready()` or for about 50 microseconds; true when ready.
template <class Ready>
bool spin(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

constexpr uint64_t kIndexMask = 0xffffffffu;

}  // namespace

// The tasks of one node that are still to be handed out.
//
// A ticket is (job number << 32 | next index); indices are claimed by compare-and-swap, so a claim
// succeeds only for the job whose task and sizes the thread has read after the ticket. Between jobs
// the index is kIndexMask and nothing can be claimed.
struct alignas(64) Lane {
  std::atomic<uint64_t> ticket{kIndexMask};
  std::atomic<uint32_t> end{0};
};

struct ThreadPool::State {
  explicit State(int num_nodes) : lanes(num_nodes) {}

  std::vector<Lane> lanes;
  uint64_t job = 0;

  // The job being run.
  std::atomic<const TaskRef*> task{nullptr};
  std::atomic<uint32_t> num_tasks{0};
  std::atomic<bool> strict{false};
  Word num_done{0};
  Word caller_sleeps{0};

  Word wake{0};  // bumped for every job: what workers sleep on
  std::atomic<int> num_sleepers{0};
  std::atomic<bool> stop{false};

  std::atomic<bool> failed{false};
  std::exception_ptr error;

  std::mutex queue;  // one job at a time
  std::vector<std::thread> workers;

  void work(int thread, int node, const Hooks& hooks);
  void work_lane(Lane& lane, bool own, int thread, bool& entered, const Hooks& hooks);
  void worker_main(int thread, int node, const Hooks& hooks);
  void wait_done(uint32_t count);
};

void ThreadPool::State::work_lane(Lane& lane, bool own, int thread, bool& entered,
                                  const Hooks& hooks) {
  uint64_t seen = lane.ticket.load(std::memory_order_acquire);
  while (true) {
    const TaskRef* current = task.load(std::memory_order_acquire);
    const uint32_t count = num_tasks.load(std::memory_order_acquire);
    const uint64_t index = seen & kIndexMask;
    if (index >= lane.end.load(std::memory_order_acquire)) return;
    if (!own && strict.load(std::memory_order_acquire)) return;
    if (!lane.ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    if (!entered && hooks.enter) hooks.enter();
    entered = true;
    if (!failed.load(std::memory_order_relaxed)) {
      try {
        (*current)(static_cast<int64_t>(index), thread);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
    if (num_done.fetch_add(1) + 1 == count && caller_sleeps.load() != 0) futex_wake(num_done, 1);
    seen = lane.ticket.load(std::memory_order_acquire);
  }
}

// The tasks of the thread's own node first, then those of the nodes after it.
void ThreadPool::State::work(int thread, int node, const Hooks& hooks) {
  const FloatState float_state;
  bool entered = false;
  const size_t count = lanes.size();
  for (size_t i = 0; i < count; ++i) {
    work_lane(lanes[(node + i) % count], i == 0, thread, entered, hooks);
  }
  if (entered && hooks.leave) hooks.leave();
}

void ThreadPool::State::worker_main(int thread, int node, const Hooks& hooks) {
  uint32_t seen = 0;
  while (true) {
    if (!spin([&] { return wake.load(std::memory_order_acquire) != seen; })) {
      num_sleepers.fetch_add(1);
      while (wake.load() == seen) futex_wait(wake, seen);
      num_sleepers.fetch_sub(1);
    }
    seen = wake.load(std::memory_order_acquire);
    if (stop.load(std::memory_order_acquire)) return;
    work(thread, node, hooks);
  }
}

void ThreadPool::State::wait_done(uint32_t count) {
  if (spin([&] { return num_done.load(std::memory_order_acquire) == count; })) return;
  caller_sleeps.store(1);
  for (uint32_t done = num_done.load(); done != count; done = num_done.load()) {
    futex_wait(num_done, done);
  }
  caller_sleeps.store(0);
}

ThreadPool::ThreadPool(int num_threads, Hooks hooks, std::vector<Node> nodes)
    : num_threads_(std::max(1, num_threads)), hooks_(hooks), nodes_(std::move(nodes)) {
  if (nodes_.empty()) nodes_.emplace_back();
  if (num_nodes() > num_threads_) nodes_.resize(num_threads_);
  start();
}

void ThreadPool::start() {
  owner_pid_ = getpid();
  state_ = std::make_unique<State>(num_nodes());
  for (int thread = 1; thread < num_threads_; ++thread) {
    try {
      state_->workers.emplace_back([this, thread] {
        const int node = node_of(thread);
        bind_thread(nodes_[node]);
        state_->worker_main(thread, node, hooks_);
      });
    } catch (const std::system_error&) {
      stop();  // a thread that is destroyed while it runs ends the process
      fail("the system gave ", thread, " of the ", num_threads_,
           " threads that were asked for; ask for fewer");
    }
  }
}

ThreadPool::~ThreadPool() {
  if (owner_pid_ != getpid()) {
    // Forked: the threads do not exist here, and joining or destroying them would hang.
    static_cast<void>(state_.release());
    return;
  }
  stop();
}

void ThreadPool::stop() {
  state_->stop.store(true);
  state_->wake.fetch_add(1);
  futex_wake(state_->wake, INT_MAX);
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::run(int64_t num_tasks, TaskRef task) {
  for (int64_t base = 0; base < num_tasks; base += INT_MAX) {
    const auto from_base = [&](int64_t index, int thread) { task(base + index, thread); };
    const int64_t first[] = {0, std::min<int64_t>(num_tasks - base, INT_MAX)};
    run_job(first, Affinity::kPreferred, from_base);
  }
}

void ThreadPool::run_by_node(std::span<const int64_t> first, Affinity affinity, TaskRef task) {
  if (affinity == Affinity::kStrict && num_nodes() > 1) {
    // The caller stands for the threads of node 0, so it must be there.
    const BoundThread here(nodes_[0]);
    run_job(first, affinity, task);
    return;
  }
  run_job(first, affinity, task);
}

void ThreadPool::run_job(std::span<const int64_t> first, Affinity affinity, TaskRef task) {
  if (first.back() == 0) return;
  if (owner_pid_ != getpid()) {
    static_cast<void>(state_.release());
    start();
  }
  State& state = *state_;
  std::lock_guard<std::mutex> turn(state.queue);
  const auto count = static_cast<uint32_t>(first.back());
  state.failed.store(false);
  state.error = nullptr;
  state.num_done.store(0);
  state.task.store(&task, std::memory_order_release);
  state.num_tasks.store(count, std::memory_order_release);
  state.strict.store(affinity == Affinity::kStrict, std::memory_order_release);
  const uint64_t job = ++state.job << 32;
  for (size_t lane = 0; lane + 1 < first.size(); ++lane) {
    // The end is that of the job before for a moment; a claim then still needs that job's number.
    state.lanes[lane].end.store(static_cast<uint32_t>(first[lane + 1]), std::memory_order_release);
    state.lanes[lane].ticket.store(job | static_cast<uint64_t>(first[lane]),
                                   std::memory_order_release);
  }
  const bool all = affinity == Affinity::kStrict;
  if ((count > 1 || all) && num_threads_ > 1) {
    state.wake.fetch_add(1);
    const int needed = all ? num_threads_ : std::min<int64_t>(count - 1, num_threads_ - 1);
    if (state.num_sleepers.load() > 0) futex_wake(state.wake, needed);
  }
  state.work(0, 0, hooks_);
  state.wait_done(count);
  for (size_t lane = 0; lane + 1 < first.size(); ++lane) {
    state.lanes[lane].ticket.store(job | kIndexMask, std::memory_order_release);
  }
  if (state.failed.load()) std::rethrow_exception(state.error);
}

}  // namespace hetero
