// From a number of rows to the instance of a template for it: so many accumulators are registers.
#pragma once

namespace hetero {
namespace {

template <int kCount>
struct RowCount {
  static constexpr int value = kCount;
};

// Calls f(RowCount<rows>{}) where 1 <= rows <= kMost; tells whether it did.
template <int kMost, class F>
inline bool by_rows(int rows, const F& f) {
  if constexpr (kMost > 0) {
    if (rows != kMost) return by_rows<kMost - 1>(rows, f);
    f(RowCount<kMost>{});
    return true;
  }
  return false;
}

}  // namespace
}  // namespace hetero
