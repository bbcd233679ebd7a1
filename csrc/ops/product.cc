#include "ops/product.h"

#include <algorithm>

#include "cpu/topology.h"

namespace hetero {
namespace {

int depth_of(const Matrix& matrix, Direction direction) {
  return direction == Direction::kForward ? matrix.k_pad() : matrix.n_pad();
}
int width_of(const Matrix& matrix, Direction direction) {
  return direction == Direction::kForward ? matrix.k : matrix.n;
}
int tiles_of(const Matrix& matrix, Direction direction) {
  return (direction == Direction::kForward ? matrix.n_pad() : matrix.k_pad()) / kPanel;
}

// What one thread works in.
struct Workspace {
  std::byte* main = nullptr;      // packed rows
  std::byte* extra[2] = {};       // packed rows of the extras
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
      total_rows_ += product.num_rows;
    }
    depth_ = depth_of(products[0].main.matrix, direction);
    num_groups_ = tiles_of(products[0].main.matrix, direction) / group;
  }

  void run(TileRef done) {
    plan();
    allocate();
    if (shared_ != nullptr) pack_shared();
    const int64_t num_tasks = static_cast<int64_t>(products_.size()) * chunks_;
    context_.parallel(num_tasks, [&](int64_t task, int thread) {
      const Product& product = products_[task / chunks_];
      const int chunk = static_cast<int>(task % chunks_);
      const int first = static_cast<int>(static_cast<int64_t>(num_groups_) * chunk / chunks_);
      const int last = static_cast<int>(static_cast<int64_t>(num_groups_) * (chunk + 1) / chunks_);
      if (product.num_rows == 0 || first == last) return;
      Workspace& workspace = workspaces_[thread];
      hold(product, workspace);
      for (int i = first; i < last; ++i) {
        for (int j = 0; j < group_; ++j) {
          compute(product, workspace, i * group_ + j,
                  workspace.tiles + static_cast<size_t>(j) * product.num_rows * kPanel);
        }
        done(product, i * group_, workspace.tiles);
      }
    });
  }

 private:
  // A task should take a few microseconds at least, and there should be several per thread.
  void plan() {
    constexpr double kLeastWork = 2e5;  // multiply-adds
    const double group_work =
        static_cast<double>(total_rows_) / products_.size() * depth_ * kPanel * group_;
    const double total = group_work * num_groups_ * products_.size();
    const int threads = context_.num_threads();
    const double work = std::max(kLeastWork, total / (threads * 8.0));
    chunks_ = std::clamp(static_cast<int>(group_work * num_groups_ / work), 1, num_groups_);
    if (threads == 1) chunks_ = 1;
  }

  void allocate() {
    const KernelSet& kernels = context_.kernels();
    const int threads = context_.num_threads();
    const size_t main_bytes = kernels.a_bytes(most_rows_, depth_);
    // When many tasks share the rows of a product, they are packed once, for all threads together.
    if (chunks_ > 2) {
      shared_ = op_.take<std::byte>(main_bytes * products_.size());
      shared_stride_ = main_bytes;
    }
    size_t extra_bytes[2] = {};
    int most_extra = 0;
    for (const Product& product : products_) {
      for (int i = 0; i < 2; ++i) {
        if (product.extra[i].matrix.data == nullptr) continue;
        const int depth = depth_of(product.extra[i].matrix, direction_);
        extra_bytes[i] = std::max(extra_bytes[i], kernels.a_bytes(most_rows_, depth));
        most_extra = std::max(most_extra, depth);
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
      if (direction_ == Direction::kTransposed) {
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
      kernels.pack_a_block(product.main.rows, product.num_rows,
                           width_of(product.main.matrix, direction_), depth_, block,
                           shared_ + shared_stride_ * (task / blocks));
    });
  }

  // Makes `workspace` hold the packed rows of `product`.
  void hold(const Product& product, Workspace& workspace) {
    if (workspace.held == &product) return;
    workspace.held = &product;
    const KernelSet& kernels = context_.kernels();
    if (shared_ != nullptr) {
      workspace.main = shared_ + shared_stride_ * (&product - products_.data());
    } else {
      kernels.pack_a(product.main.rows, product.num_rows, width_of(product.main.matrix, direction_),
                     depth_, workspace.main);
    }
    for (int i = 0; i < 2; ++i) {
      const Operand& extra = product.extra[i];
      if (extra.matrix.data == nullptr) continue;
      kernels.pack_a(extra.rows, product.num_rows, width_of(extra.matrix, direction_),
                     depth_of(extra.matrix, direction_), workspace.extra[i]);
    }
  }

  const uint16_t* panel_of(const Matrix& matrix, int tile, const Workspace& workspace) const {
    if (direction_ == Direction::kForward) {
      return matrix.data + static_cast<size_t>(tile) * matrix.k_pad() * kPanel;
    }
    context_.kernels().repair(matrix.data, matrix.n_pad() / kPanel, matrix.k_pad(), tile,
                              workspace.panel);
    return workspace.panel;
  }

  void compute(const Product& product, const Workspace& workspace, int tile, float* c) const {
    const KernelSet& kernels = context_.kernels();
    kernels.gemm(workspace.main, product.num_rows, depth_,
                 panel_of(product.main.matrix, tile, workspace), c, kPanel, false);
    const int which = product.alternate ? tile % 2 : 0;
    const Matrix& extra = product.extra[which].matrix;
    if (extra.data == nullptr) return;
    kernels.gemm(workspace.extra[which], product.num_rows, depth_of(extra, direction_),
                 panel_of(extra, tile, workspace), workspace.low_rank, kPanel, false);
    kernels.add_scaled(workspace.low_rank, product.scale, c, product.num_rows * kPanel);
  }

  Context& context_;
  Op op_;
  std::span<const Product> products_;
  Direction direction_;
  int group_;
  int depth_ = 0;
  int num_groups_ = 0;
  int most_rows_ = 0;
  int64_t total_rows_ = 0;
  int chunks_ = 1;
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

void multiply(Context& context, std::span<const Product> products, Direction direction, int group,
              TileRef done) {
  if (!products.empty()) Multiplication(context, products, direction, group).run(done);
}

}  // namespace hetero
