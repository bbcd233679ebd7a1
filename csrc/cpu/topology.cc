#include "cpu/topology.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>
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

// The smallest quota on the way from this process's cgroup (version 2) to the root, in processors.
double quota_v2(std::string group) {
  double quota = HUGE_VAL;
  while (true) {
    std::istringstream line(read_line("/sys/fs/cgroup" + group + "/cpu.max"));
    double share, period;
    if (line >> share >> period && period > 0) quota = std::min(quota, share / period);
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
    std::istringstream share_line(read_line(base + "cpu.cfs_quota_us"));
    std::istringstream period_line(read_line(base + "cpu.cfs_period_us"));
    double share, period;
    if (share_line >> share && period_line >> period && share > 0 && period > 0) {
      quota = std::min(quota, share / period);
    }
  }
  return quota;
}

}  // namespace

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
