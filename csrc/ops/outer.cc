#include "ops/outer.h"

#include <algorithm>

#include "base/dtype.h"

namespace hetero {
namespace {

// Rows are summed in blocks of this many: a block's panel stays in the first-level cache. Part of
// the numerics.
constexpr int kBlock = 512;

int num_blocks(const OuterSum& sum) { return ceil_div(sum.num_rows, kBlock); }
int block_rows(const OuterSum& sum, int block) {
  return std::min(kBlock, sum.num_rows - block * kBlock);
}

}  // namespace

void add_outer_sums(Context& context, std::span<const OuterSum> sums, const OuterShape& shape) {
  const KernelSet& kernels = context.kernels();
  Op op(context);
  const int threads = context.num_threads();
  int most_rows = 0, most_blocks = 0;
  for (const OuterSum& sum : sums) {
    most_rows = std::max(most_rows, std::min(kBlock, sum.num_rows));
    most_blocks = std::max(most_blocks, num_blocks(sum));
  }
  if (most_rows == 0 || shape.m == 0 || shape.n == 0) return;

  // The left rows, transposed: m rows of `depth` values, packed per block.
  const int depth = round_up(most_rows, kPanel);
  const size_t block_bytes = kernels.a_bytes(shape.m, depth);
  auto* packed = op.take<std::byte>(block_bytes * most_blocks * sums.size());
  auto* turned = op.take<uint16_t>(static_cast<size_t>(threads) * shape.m * depth);
  auto** turned_rows = op.take<const uint16_t*>(static_cast<size_t>(threads) * shape.m);
  context.parallel(static_cast<int64_t>(sums.size()) * most_blocks, [&](int64_t task, int thread) {
    const OuterSum& sum = sums[task / most_blocks];
    const int block = static_cast<int>(task % most_blocks);
    if (block >= num_blocks(sum)) return;
    const int rows = block_rows(sum, block);
    const uint16_t* const* from = sum.left + static_cast<size_t>(block) * kBlock;
    uint16_t* to = turned + static_cast<size_t>(thread) * shape.m * depth;
    const uint16_t** to_rows = turned_rows + static_cast<size_t>(thread) * shape.m;
    for (int i = 0; i < shape.m; ++i) to_rows[i] = to + static_cast<size_t>(i) * depth;
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < shape.m; ++i) to[static_cast<size_t>(i) * depth + row] = from[row][i];
    }
    kernels.pack_a(to_rows, shape.m, rows, round_up(rows, kPanel), packed + block_bytes * task);
  });

  const int tiles = ceil_div(shape.n, kPanel);
  auto* panels = op.take<uint16_t>(static_cast<size_t>(threads) * depth * kPanel);
  auto* results = op.take<float>(static_cast<size_t>(threads) * shape.m * kPanel);
  context.parallel(static_cast<int64_t>(sums.size()) * tiles, [&](int64_t task, int thread) {
    const int64_t which = task / tiles;
    const OuterSum& sum = sums[which];
    const int first = static_cast<int>(task % tiles) * kPanel;
    uint16_t* panel = panels + static_cast<size_t>(thread) * depth * kPanel;
    float* result = results + static_cast<size_t>(thread) * shape.m * kPanel;
    if (sum.num_rows == 0) return;
    for (int block = 0; block < num_blocks(sum); ++block) {
      const int rows = block_rows(sum, block);
      kernels.pack_rows(sum.right + static_cast<size_t>(block) * kBlock, rows, shape.n, first,
                        panel);
      kernels.gemm(packed + block_bytes * (which * most_blocks + block), shape.m,
                   round_up(rows, kPanel), panel, result, kPanel, block > 0);
    }
    const int columns = std::min(kPanel, shape.n - first);
    for (int j = 0; j < columns; ++j) {
      float* out = sum.out + (first + j) * shape.stride_j;
      for (int i = 0; i < shape.m; ++i) {
        out[i * shape.stride_i] += shape.scale * result[i * kPanel + j];
      }
    }
  });
}

}  // namespace hetero
