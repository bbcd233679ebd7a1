// Walks the rows of the left operand in the tile's blocks.
//
// Tile provides: block_rows(rows_left), block_bytes(rows, k_pad), pack(row_ptrs, rows, k, k_pad,
// dst), multiply(rows, a, k_pad, panel, fetch, c, ldc, accumulate), enter(), leave().
#pragma once

#include "kernels/fetch.h"
#include "kernels/kernel.h"

namespace hetero {
namespace {

void enter() { Tile::enter(); }
void leave() { Tile::leave(); }

size_t a_bytes(int rows, int k_pad) {
  size_t bytes = 0;
  while (rows > 0) {
    const int block = Tile::block_rows(rows);
    bytes += Tile::block_bytes(block, k_pad);
    rows -= block;
  }
  return bytes;
}

int a_blocks(int rows) {
  int blocks = 0;
  for (; rows > 0; ++blocks) rows -= Tile::block_rows(rows);
  return blocks;
}

void pack_a_block(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, int block,
                  void* dst) {
  char* to = static_cast<char*>(dst);
  int count = Tile::block_rows(rows);
  for (; block > 0; --block) {
    to += Tile::block_bytes(count, k_pad);
    row_ptrs += count;
    rows -= count;
    count = Tile::block_rows(rows);
  }
  Tile::pack(row_ptrs, count, k, k_pad, to);
}

void pack_a(const uint16_t* const* row_ptrs, int rows, int k, int k_pad, void* dst) {
  char* to = static_cast<char*>(dst);
  while (rows > 0) {
    const int count = Tile::block_rows(rows);
    Tile::pack(row_ptrs, count, k, k_pad, to);
    to += Tile::block_bytes(count, k_pad);
    row_ptrs += count;
    rows -= count;
  }
}

void gemm(const void* a, int rows, int k_pad, const uint16_t* panel, float* c, int ldc,
          bool accumulate) {
  const char* from = static_cast<const char*>(a);
  const int blocks = a_blocks(rows);
  for (int block = 0; block < blocks; ++block) {
    const int count = Tile::block_rows(rows);
    Tile::multiply(count, from, k_pad, panel, fetch_of(panel, k_pad, block, blocks), c, ldc,
                   accumulate);
    from += Tile::block_bytes(count, k_pad);
    c += static_cast<ptrdiff_t>(count) * ldc;
    rows -= count;
  }
}

}  // namespace
}  // namespace hetero
