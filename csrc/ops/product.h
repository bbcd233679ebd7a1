// multiply(): many products of row blocks with packed matrices, tile by tile: the loop under linear
// and the experts.
#pragma once

#include <cstdint>
#include <span>

#include "ops/context.h"

namespace hetero {

// A packed weight [N, K]: panels [N/32][K/2][32][2] bf16, both padded with zeros, or coded panels.
struct Matrix {
  const uint16_t* data = nullptr;
  int n = 0;
  int k = 0;
  const Format* format = nullptr;  // null: bf16

  int n_pad() const { return (n + kPanel - 1) / kPanel * kPanel; }
  int k_pad() const { return (k + kPanel - 1) / kPanel * kPanel; }
  // Elements of data in one panel, and in the matrix.
  size_t panel_size() const {
    return format != nullptr ? panel_bytes(*format, k_pad()) / sizeof(uint16_t)
                             : static_cast<size_t>(kPanel) * k_pad();
  }
  size_t size() const { return panel_size() * (n_pad() / kPanel); }
  const std::byte* codes() const { return reinterpret_cast<const std::byte*>(data); }
};

// kForward: y = x W^T, tiles are 32 of N, rows have k values. kTransposed: dx = dy W, tiles are 32
// of K, rows have n values.
enum class Direction { kForward, kTransposed };

struct Operand {
  const uint16_t* const* rows = nullptr;  // one pointer per row, so that a gather costs nothing
  Matrix matrix;                          // no data: the operand is absent
};

// What is added to rows [first, first + num_rows) of a product: scale * rows of a second operand
// times its matrix, the low-rank part of LoRA. Rows of several adapters share the main matrix,
// which is read once, and have an extra each.
struct Extra {
  int64_t first = 0;
  int64_t num_rows = 0;
  Operand operand;  // operand.rows[0] belongs to row `first`
  float scale = 1.0f;
};

// The part of `extras` that lies in rows [first, first + num_rows), counted from `first`; in the
// op's scratch.
std::span<const Extra> extras_within(Op& op, std::span<const Extra> extras, int64_t first,
                                     int64_t num_rows);

// A block of rows times one matrix, plus extras; their rows do not overlap. The j-th tile of a
// group takes extra[j].
struct Product {
  int num_rows = 0;
  Operand main;
  std::span<const Extra> extra[2];
  int tag = 0;    // the caller's: which matrix
  int first = 0;  // the caller's: where its rows begin
};

// Receives finished tiles: (product, i, c, thread). c holds `group` tiles [num_rows][32] fp32, one
// after the other. With G groups, the j-th of them is tile i + j G of the matrix.
class TileRef {
 public:
  template <class F>
  TileRef(F& function)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(&function))),
        call_([](void* object, const Product& product, int group, float* c, int thread) {
          (*static_cast<F*>(object))(product, group, c, thread);
        }) {}
  void operator()(const Product& product, int group, float* c, int thread) const {
    call_(object_, product, group, c, thread);
  }

 private:
  void* object_;
  void (*call_)(void*, const Product&, int, float*, int);
};

// The most rows of `depth` (padded) values that a product should have, so that they stay in the
// cache.
int max_rows(const Context& context, int depth);

// `num_rows` rows times one matrix, as products of at most max_rows() rows, in the op's scratch.
std::span<Product> row_blocks(Context& context, Op& op, const Operand& main, int64_t num_rows,
                              Direction direction);

// Computes every tile of every product, `group` of them at a time (their number is a multiple of
// it), on all threads. All products have matrices of the same size. The bits of a row depend on
// that row and its matrix alone.
void multiply(Context& context, std::span<const Product> products, Direction direction, int group,
              TileRef done);

}  // namespace hetero
