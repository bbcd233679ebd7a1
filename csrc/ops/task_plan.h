// TaskPlan: the groups of tiles of many products, divided among memory nodes and cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ops/context.h"

namespace hetero {

class TaskPlan {
 public:
  // Groups [first, last) of a product.
  struct Task {
    size_t product;
    int first, last;
  };

  // chunks(product, groups) says into how many tasks so many groups of a product are to be cut;
  // less than 1 for a product without rows.
  template <class Chunks>
  TaskPlan(Op& op, size_t products, int groups, int nodes, Chunks chunks)
      : products_(products), groups_(groups), nodes_(nodes) {
    first_task_ = op.take<int64_t>(products * nodes + 1);
    by_node_ = op.take<int64_t>(nodes + 1);
    int64_t tasks = 0;
    for (int node = 0; node < nodes; ++node) {
      by_node_[node] = tasks;
      const int own = node_begin(groups, node + 1, nodes) - node_begin(groups, node, nodes);
      for (size_t product = 0; product < products; ++product) {
        first_task_[node * products + product] = tasks;
        const int wanted = own == 0 ? 0 : chunks(product, own);
        if (wanted < 1) continue;
        const int cut = std::min(wanted, own);
        tasks += cut;
      }
    }
    first_task_[products * nodes] = by_node_[nodes] = tasks;
  }

  std::span<const int64_t> by_node() const { return {by_node_, static_cast<size_t>(nodes_) + 1}; }
  int64_t num_tasks() const { return by_node_[nodes_]; }

  Task at(int64_t task) const {
    const size_t count = products_ * nodes_;
    const size_t which = std::upper_bound(first_task_, first_task_ + count, task) - first_task_ - 1;
    const int node = static_cast<int>(which / products_);
    const int begin = node_begin(groups_, node, nodes_);
    const int64_t own = node_begin(groups_, node + 1, nodes_) - begin;
    const int64_t chunk = task - first_task_[which];
    const int64_t chunks = first_task_[which + 1] - first_task_[which];
    return {which % products_, begin + static_cast<int>(own * chunk / chunks),
            begin + static_cast<int>(own * (chunk + 1) / chunks)};
  }

 private:
  size_t products_;
  int groups_, nodes_;
  int64_t* first_task_;  // [nodes * products + 1]
  int64_t* by_node_;     // [nodes + 1]
};

}  // namespace hetero
