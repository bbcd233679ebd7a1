// Right: a packed matrix as the right operand of products in one direction, which decides how rows
// are packed for it.
#pragma once

#include "ops/product.h"

namespace hetero {

class Right {
 public:
  Right(const KernelSet& kernels, const Matrix& matrix, Direction direction)
      : kernels_(kernels), matrix_(matrix), forward_(direction == Direction::kForward) {}

  // Values of a row, as they come and padded, and the tiles of the product.
  int width() const { return forward_ ? matrix_.k : matrix_.n; }
  int depth() const { return forward_ ? matrix_.k_pad() : matrix_.n_pad(); }
  int tiles() const { return (forward_ ? matrix_.n_pad() : matrix_.k_pad()) / kPanel; }

  // Bytes of packed rows, whole cache lines.
  size_t bytes(int64_t rows) const {
    const int count = static_cast<int>(rows);
    const size_t bytes = coded() ? kernels_.coded_a_bytes(*matrix_.format, count, depth())
                                 : kernels_.a_bytes(count, depth());
    constexpr size_t kLine = 64;
    return (bytes + kLine - 1) / kLine * kLine;
  }

  // One of the a_blocks(num_rows) blocks of rows.
  void pack_block(const uint16_t* const* rows, int num_rows, int block, std::byte* to) const {
    if (coded()) {
      kernels_.pack_coded_a_block(*matrix_.format, rows, num_rows, width(), depth(), block, to);
    } else {
      kernels_.pack_a_block(rows, num_rows, width(), depth(), block, to);
    }
  }
  void pack(const uint16_t* const* rows, int num_rows, std::byte* to) const {
    const int blocks = kernels_.a_blocks(num_rows);
    for (int block = 0; block < blocks; ++block) pack_block(rows, num_rows, block, to);
  }

  // Packed rows times one tile; `panel` is scratch for depth() rows of a panel.
  void multiply(const void* rows, int num_rows, int tile, uint16_t* panel, float* c) const {
    const uint16_t* own = matrix_.data + matrix_.panel_size() * tile;
    if (coded()) {
      kernels_.gemm_coded(rows, num_rows, depth(), *matrix_.format,
                          reinterpret_cast<const std::byte*>(own), panel, c, kPanel);
      return;
    }
    if (!forward_) {
      const int panels = matrix_.n_pad() / kPanel;
      if (matrix_.format != nullptr) {
        kernels_.repair_coded(*matrix_.format, matrix_.codes(), panels, matrix_.k_pad(), tile,
                              panel);
      } else {
        kernels_.repair(matrix_.data, panels, matrix_.k_pad(), tile, panel);
      }
    }
    kernels_.gemm(rows, num_rows, depth(), forward_ ? own : panel, c, kPanel, false);
  }

 private:
  // Codes are multiplied forward only; backward they become bf16 panels.
  bool coded() const { return forward_ && matrix_.format != nullptr; }

  const KernelSet& kernels_;
  const Matrix& matrix_;
  bool forward_;
};

}  // namespace hetero
