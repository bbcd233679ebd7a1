#include "ops/product.h"

#include <algorithm>
#include <optional>

#include "cpu/topology.h"
#include "ops/right.h"
#include "ops/task_plan.h"

namespace hetero {
namespace {

// What one thread works in.
struct Workspace {
  std::byte* main = nullptr;      // packed rows
  std::byte* extra[2] = {};       // packed rows of the extras, one after the other
  uint16_t* panel = nullptr;      // a re-paired panel
  float* tiles = nullptr;         // `group` tiles
  float* low_rank = nullptr;      // one tile of an extra
  const Product* held = nullptr;  // the product whose rows are packed here
};

class Multiplication {
 public:
  Multiplication(Context& context, std::span<const Product> products, Direction direction,
                 int group)
      : context_(context), op_(context), products_(products), direction_(direction), group_(group) {
    for (const Product& product : products) {
      most_rows_ = std::max(most_rows_, product.num_rows);
    }
    const Right right = right_of(products[0].main);
    depth_ = right.depth();
    num_groups_ = right.tiles() / group;
  }

  void run(TileRef done) {
    plan();
    allocate();
    if (shared_ != nullptr) pack_shared();
    context_.parallel_by_node(plan_->by_node(), [&](int64_t index, int thread) {
      const TaskPlan::Task task = plan_->at(index);
      const Product& product = products_[task.product];
      Workspace& workspace = workspaces_[thread];
      hold(product, workspace);
      for (int i = task.first; i < task.last; ++i) {
        float* c = workspace.tiles;
        for (int j = 0; j < group_; ++j, c += static_cast<size_t>(product.num_rows) * kPanel) {
          compute(product, workspace, i + j * num_groups_, j, c);
        }
        done(product, i, workspace.tiles, thread);
      }
    });
  }

 private:
  // Cuts every product into tasks of some groups of tiles, shorter and shorter ones, so that all
  // threads end together: a task is a part of what then is left, and long enough to be worth
  // handing out. A few rows cost as much as eight: their time goes into reading the panel.
  void plan() {
    constexpr double kLeastWork = 2e6;  // multiply-adds, some 10 microseconds
    const auto group_work = [&](const Product& product) {
      return static_cast<double>(std::max(product.num_rows, 8)) * depth_ * kPanel * group_;
    };
    double total = 0;
    for (const Product& product : products_) total += group_work(product) * num_groups_;
    // The panels of a transposed product lie on all nodes.
    const int nodes = direction_ == Direction::kForward ? context_.num_nodes() : 1;
    const int threads = context_.num_threads();
    double left = 0;
    plan_.emplace(op_, products_.size(), num_groups_, nodes, [&](size_t which, int groups) {
      if (which == 0) left = total / nodes;
      const Product& product = products_[which];
      const double work = group_work(product) * groups;
      const double task = std::max(kLeastWork, left * nodes / (threads * 3.0));
      left -= work;
      if (product.num_rows == 0) return 0;
      return threads == 1 ? 1 : std::max(1, static_cast<int>(work / task + 0.5));
    });
  }

  Right right_of(const Operand& operand) const {
    return {context_.kernels(), operand.matrix, direction_};
  }

  void allocate() {
    const int threads = context_.num_threads();
    const size_t main_bytes = right_of(products_[0].main).bytes(most_rows_);
    // When many tasks share the rows of a product, they are packed once, for all threads together.
    if (plan_->num_tasks() > 2 * static_cast<int64_t>(products_.size())) {
      shared_ = op_.take<std::byte>(main_bytes * products_.size());
      shared_stride_ = main_bytes;
    }
    size_t extra_bytes[2] = {};
    int most_extra = 0;
    for (const Product& product : products_) {
      for (int i = 0; i < 2; ++i) {
        size_t bytes = 0;
        for (const Extra& extra : product.extra[i]) {
          const Right right = right_of(extra.operand);
          bytes += right.bytes(extra.num_rows);
          most_extra = std::max(most_extra, right.depth());
        }
        extra_bytes[i] = std::max(extra_bytes[i], bytes);
      }
    }
    workspaces_ = op_.take<Workspace>(threads);
    const size_t tile = static_cast<size_t>(most_rows_) * kPanel;
    for (int thread = 0; thread < threads; ++thread) {
      Workspace& workspace = *new (&workspaces_[thread]) Workspace;
      if (shared_ == nullptr) workspace.main = op_.take<std::byte>(main_bytes);
      for (int i = 0; i < 2; ++i) {
        if (extra_bytes[i] > 0) workspace.extra[i] = op_.take<std::byte>(extra_bytes[i]);
      }
      workspace.tiles = op_.take<float>(tile * group_);
      if (most_extra > 0) workspace.low_rank = op_.take<float>(tile);
      if (direction_ == Direction::kTransposed || products_[0].main.matrix.format != nullptr) {
        workspace.panel =
            op_.take<uint16_t>(static_cast<size_t>(std::max(depth_, most_extra)) * kPanel);
      }
    }
  }

  void pack_shared() {
    const KernelSet& kernels = context_.kernels();
    const int blocks = kernels.a_blocks(most_rows_);
    context_.parallel(static_cast<int64_t>(products_.size()) * blocks, [&](int64_t task, int) {
      const Product& product = products_[task / blocks];
      const int block = static_cast<int>(task % blocks);
      if (block >= kernels.a_blocks(product.num_rows)) return;
      right_of(product.main)
          .pack_block(product.main.rows, product.num_rows, block,
                      shared_ + shared_stride_ * (task / blocks));
    });
  }

  // Makes `workspace` hold the packed rows of `product`.
  void hold(const Product& product, Workspace& workspace) {
    if (workspace.held == &product) return;
    workspace.held = &product;
    if (shared_ != nullptr) {
      workspace.main = shared_ + shared_stride_ * (&product - products_.data());
    } else {
      right_of(product.main).pack(product.main.rows, product.num_rows, workspace.main);
    }
    for (int i = 0; i < 2; ++i) {
      std::byte* to = workspace.extra[i];
      for (const Extra& extra : product.extra[i]) {
        const Right right = right_of(extra.operand);
        right.pack(extra.operand.rows, static_cast<int>(extra.num_rows), to);
        to += right.bytes(extra.num_rows);
      }
    }
  }

  void compute(const Product& product, const Workspace& workspace, int tile, int which,
               float* c) const {
    right_of(product.main).multiply(workspace.main, product.num_rows, tile, workspace.panel, c);
    const std::byte* rows = workspace.extra[which];
    for (const Extra& extra : product.extra[which]) {
      const int num_rows = static_cast<int>(extra.num_rows);
      const Right right = right_of(extra.operand);
      right.multiply(rows, num_rows, tile, workspace.panel, workspace.low_rank);
      context_.kernels().add_scaled(workspace.low_rank, extra.scale, c + extra.first * kPanel,
                                    num_rows * kPanel);
      rows += right.bytes(extra.num_rows);
    }
  }

  Context& context_;
  Op op_;
  std::span<const Product> products_;
  Direction direction_;
  int group_;
  int depth_ = 0;
  int num_groups_ = 0;
  int most_rows_ = 0;
  std::optional<TaskPlan> plan_;
  std::byte* shared_ = nullptr;
  size_t shared_stride_ = 0;
  Workspace* workspaces_ = nullptr;
};

}  // namespace

int max_rows(const Context& context, int depth) {
  // Half of the second-level cache for the packed rows; the rest for a panel, its tiles and the
  // neighbours.
  constexpr int kLeast = 96;
  const size_t bytes = context.kernels().a_bytes(kLeast, depth);
  return static_cast<int>(std::clamp<size_t>(l2_bytes() / 2 * kLeast / bytes, kLeast, 4096));
}

std::span<const Extra> extras_within(Op& op, std::span<const Extra> extras, int64_t first,
                                     int64_t num_rows) {
  auto* found = op.take<Extra>(extras.size());
  size_t count = 0;
  for (const Extra& extra : extras) {
    const int64_t begin = std::max(extra.first, first),
                  end = std::min(extra.first + extra.num_rows, first + num_rows);
    if (begin >= end) continue;
    const Operand operand{extra.operand.rows + (begin - extra.first), extra.operand.matrix};
    new (&found[count++]) Extra{begin - first, end - begin, operand, extra.scale};
  }
  return {found, count};
}

std::span<Product> row_blocks(Context& context, Op& op, const Operand& main, int64_t num_rows,
                              Direction direction) {
  const int64_t most = max_rows(context, Right(context.kernels(), main.matrix, direction).depth());
  const int64_t blocks = (num_rows + most - 1) / most;
  auto* products = op.take<Product>(blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = num_rows * block / blocks;
    Product& product = *new (&products[block]) Product;
    product.num_rows = static_cast<int>(num_rows * (block + 1) / blocks - first);
    product.first = static_cast<int>(first);
    product.main = {main.rows + first, main.matrix};
  }
  return {products, static_cast<size_t>(blocks)};
}

void multiply(Context& context, std::span<const Product> products, Direction direction, int group,
              TileRef done) {
  if (!products.empty()) Multiplication(context, products, direction, group).run(done);
}

}  // namespace hetero
