#include "formats/bf16.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"

namespace hetero::bf16 {
namespace {

uint16_t to_bf16(uint16_t value) { return value; }
uint16_t to_bf16(float value) { return float_to_bf16(value); }

template <class T>
void pack(const T* weight, int n, int k, int first, uint16_t* panel) {
  const int k_pad = round_up(k, kPanelRows), rows = std::min(kPanelRows, n - first);
  if (rows < kPanelRows || k < k_pad) {
    std::memset(panel, 0, sizeof(uint16_t) * kPanelRows * k_pad);
  }
  // 32 values of K at a time: a cache line or two of each row, 2 KiB of the panel.
  for (int start = 0; start < k; start += kPanelRows) {
    const int end = std::min(k, start + kPanelRows);
    for (int row = 0; row < rows; ++row) {
      const T* from = weight + static_cast<int64_t>(first + row) * k;
      uint16_t* to = panel + static_cast<int64_t>(start) * kPanelRows + row * 2;
      int i = start;
      for (; i + 1 < end; i += 2, to += 2 * kPanelRows) {
        to[0] = to_bf16(from[i]);
        to[1] = to_bf16(from[i + 1]);
      }
      if (i < end) to[0] = to_bf16(from[i]);
    }
  }
}

}  // namespace

void pack_panel(const uint16_t* weight, int n, int k, int first, uint16_t* panel) {
  pack(weight, n, k, first, panel);
}

void pack_panel(const float* weight, int n, int k, int first, uint16_t* panel) {
  pack(weight, n, k, first, panel);
}

void unpack_panel(const uint16_t* panel, int n, int k, int first, uint16_t* weight) {
  const int rows = std::min(kPanelRows, n - first);
  for (int row = 0; row < rows; ++row) {
    uint16_t* to = weight + static_cast<int64_t>(first + row) * k;
    for (int i = 0; i < k; ++i) to[i] = panel[(i / 2 * kPanelRows + row) * 2 + i % 2];
  }
}

}  // namespace hetero::bf16
