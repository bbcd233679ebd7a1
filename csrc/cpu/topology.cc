#include "cpu/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace hetero {
namespace {

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> allowed_cpus() {
  // The mask may be larger than cpu_set_t's 1,024 processors: grow until the kernel accepts the
  // size.
  for (int count = 1024; count <= 1 << 20; count *= 2) {
    cpu_set_t* set = CPU_ALLOC(count);
    const size_t bytes = CPU_ALLOC_SIZE(count);
    std::vector<int> cpus;
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (known) return cpus;
  }
  return {0};
}

// Processors that the hardware threads of one core share a list of; one list is one core.
int physical_cores(const std::vector<int>& cpus) {
  std::set<std::string> cores;
  for (int cpu : cpus) {
    const std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    std::string siblings = read_line(base + "thread_siblings_list");
    if (siblings.empty()) siblings = "cpu" + std::to_string(cpu);
    cores.insert(siblings);
  }
  return static_cast<int>(cores.size());
}

// The number that `text` begins with; 0 for none ("max"). No streams: see base/check.h.
double number(const std::string& text) { return std::strtod(text.c_str(), nullptr); }

// The smallest quota on the way from this process's cgroup (version 2) to the root, in processors.
double quota_v2(std::string group) {
  double quota = HUGE_VAL;
  while (true) {
    const std::string line = read_line("/sys/fs/cgroup" + group + "/cpu.max");  // "max 100000"
    const double share = number(line), period = number(line.substr(line.find(' ') + 1));
    if (share > 0 && period > 0) quota = std::min(quota, share / period);
    if (group.empty() || group == "/") return quota;
    group.resize(group.rfind('/'));
  }
}

double cgroup_quota() {
  double quota = HUGE_VAL;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) quota = std::min(quota, quota_v2(line.substr(3)));
  }
  for (const char* root : {"/sys/fs/cgroup/cpu/", "/sys/fs/cgroup/cpu,cpuacct/"}) {
    const std::string base(root);
    const double share = number(read_line(base + "cpu.cfs_quota_us"));
    const double period = number(read_line(base + "cpu.cfs_period_us"));
    if (share > 0 && period > 0) quota = std::min(quota, share / period);
  }
  return quota;
}

// "0-3,8" -> 0, 1, 2, 3, 8
std::vector<int> parse_list(const std::string& text) {
  std::vector<int> values;
  const char* at = text.c_str();
  while (*at != '\0') {
    char* end;
    const long first = std::strtol(at, &end, 10);
    if (end == at) break;
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long value = first; value <= last; ++value) values.push_back(static_cast<int>(value));
    at = *end == ',' ? end + 1 : end;
  }
  return values;
}

void allow(const std::vector<int>& cpus) {
  const int count = *std::max_element(cpus.begin(), cpus.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(count);
  const size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, set);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  sched_setaffinity(0, bytes, set);  // refused: it runs where it did
  CPU_FREE(set);
}

}  // namespace

std::vector<Node> memory_nodes() {
  const std::string root = "/sys/devices/system/node/";
  const std::vector<int> allowed = allowed_cpus();
  std::vector<Node> nodes;
  for (int number : parse_list(read_line(root + "online"))) {
    Node node;
    for (int cpu : parse_list(read_line(root + "node" + std::to_string(number) + "/cpulist"))) {
      if (std::binary_search(allowed.begin(), allowed.end(), cpu)) node.cpus.push_back(cpu);
    }
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  if (nodes.size() < 2) return {Node{}};
  return nodes;
}

void bind_thread(const Node& node) {
  if (!node.cpus.empty()) allow(node.cpus);
}

BoundThread::BoundThread(const Node& node) {
  if (node.cpus.empty()) return;
  before_ = allowed_cpus();
  allow(node.cpus);
}

BoundThread::~BoundThread() {
  if (!before_.empty()) allow(before_);
}

int usable_cores() {
  const int cores = physical_cores(allowed_cpus());
  const double quota = std::ceil(cgroup_quota());
  return std::max(1, quota < cores ? static_cast<int>(quota) : cores);
}

size_t l2_bytes() {
  static const size_t bytes = [] {
    const long reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return reported > 0 ? static_cast<size_t>(reported) : size_t{1} << 20;
  }();
  return bytes;
}

}  // namespace hetero
