// From weights to a coded panel.
#pragma once

#include "kernels/choose_floats.inl.h"
#include "kernels/turned.inl.h"

namespace hetero {
namespace {

// 32 rows of fp32 -> [padded][32], zeros from `count` on.
inline void turn_floats(const float* const* row_ptrs, int count, int padded, float* to) {
  constexpr int kSize = Turn::kSize;
  for (int first = 0; first < kPanel; first += kSize) {
    for (int start = 0; start < padded; start += kSize) {
      Turn::I square[kSize];
      for (int row = 0; row < kSize; ++row) {
        const float* from = row_ptrs[first + row] + start;
        const int left = count - start;
        float own[kSize] = {};
        if (left < kSize && left > 0) memcpy(own, from, sizeof(float) * left);
        square[row] = Turn::load(left < kSize ? own : from);
      }
      Turn::transpose(square);
      for (int i = 0; i < kSize; ++i) Turn::store(to + (start + i) * kPanel + first, square[i]);
    }
  }
}
inline void turn_weights(const float* const* row_ptrs, int count, int padded, float* to) {
  turn_floats(row_ptrs, count, padded, to);
}
inline void turn_weights(const uint16_t* const* row_ptrs, int count, int padded, float* to) {
  pack_floats(row_ptrs, kPanel, count, padded, to);
}

// One group of a panel.
struct Group {
  alignas(64) float weights[kMaxGroup][kPanel];
  int count;   // values of K that exist
  int padded;  // and with padding

  bool finite() const {
    F sum = V::zero();  // of zeros, or NaN
    for (int k = 0; k < count; ++k) {
      for (int i = 0; i < kPanel; i += V::kLanes) {
        sum = V::add(sum, V::mul(V::load(weights[k] + i), V::zero()));
      }
    }
    return V::sum(sum) == 0.0f;
  }
};

inline void store_scale(Scale kind, F scale, std::byte* to, int column) {
  const I bits = Codes::bits(scale);
  switch (kind) {
    case Scale::kBf16:
      return Codes::store_halves(to + 2 * column, Codes::right<16>(bits));
    case Scale::kOdd:
      return Codes::store_halves(to + 2 * column, Codes::right<15>(bits));
    case Scale::kE8m0:
      return Codes::store_bytes(to + column, Codes::right<23>(bits));
    case Scale::kPanelF32: {
      const float own = V::hmax(scale);
      memcpy(to, &own, sizeof(own));
      return;
    }
    case Scale::kF16:  // of files alone
      return;
  }
}

template <class Chooser>
inline void put_group(const Format& format, const Chooser& chooser, const Group& group,
                      bool least_squares, std::byte* codes, std::byte* scales) {
  for (int column = 0; column < kPanel; column += V::kLanes) {
    const Lanes lanes = {group.weights[0] + column, column, group.count};
    const Choice choice = chooser.choose(lanes, least_squares);
    const F inverse = choice.inverse();
    const auto code_at = [&](int k) { return chooser.encode(lanes.at(k), choice, inverse); };
    const auto put_words = [&](auto append) {
      const int step = codes_per_word(format.code);
      for (int k = 0; k < group.padded; k += step) {
        I word = Codes::set(0);
        for (int i = 0; i < step; ++i) word = append(word, code_at(k + i));
        Codes::store_words(codes + (k / step * kPanel + column) * sizeof(uint32_t), word);
      }
    };
    switch (format.code) {
      case Code::kTable4:
        put_words([](I word, I code) {
          return Codes::add(Codes::right<4>(word), Codes::left<28>(code));
        });
        break;
      case Code::kInt8:
        put_words([](I word, I code) {
          const I digit = Codes::add(code, Codes::set(128));
          return Codes::add(Codes::right<8>(word), Codes::left<24>(digit));
        });
        break;
      case Code::kFp8:
        for (int k = 0; k < group.padded; ++k) {
          Codes::store_bytes(codes + k * kPanel + column, code_at(k));
        }
    }
    store_scale(format.scale, choice.scale, scales, column);
    if (format.has_min) {
      store_scale(format.scale, choice.min, scales + scale_bytes(format), column);
    }
  }
}

template <class Chooser, class T>
inline bool quantize_rows(const Format& format, const T* rows, int num_rows, int k,
                          bool least_squares, std::byte* panel) {
  static const T kZeros[kMaxGroup] = {};
  const Chooser chooser(format);
  const int k_pad = round_up(k, kPanel);
  clear_padding(format, k_pad, panel);
  Group group;
  for (int first = 0; first < k_pad; first += format.group) {
    group.count = k - first < format.group ? k - first : format.group;
    group.padded = round_up(group.count, kPanel);
    const T* row_ptrs[kPanel];
    for (int row = 0; row < kPanel; ++row) {
      row_ptrs[row] = row < num_rows ? rows + static_cast<ptrdiff_t>(row) * k + first : kZeros;
    }
    turn_weights(row_ptrs, group.count, group.padded, group.weights[0]);
    if (!group.finite()) return false;
    put_group(format, chooser, group, least_squares, panel + codes_at(format, first),
              panel + scales_at(format, k_pad, first));
  }
  return true;
}

template <class Chooser>
struct Type {
  using type = Chooser;
};

template <class T>
inline bool quantize_as(const Format& format, const T* rows, int num_rows, int k,
                        bool least_squares, std::byte* panel) {
  const auto with = [&](auto chooser) {
    return quantize_rows<typename decltype(chooser)::type>(format, rows, num_rows, k, least_squares,
                                                           panel);
  };
  switch (format.scheme) {
    case Scheme::kSymmetric8:
      return with(Type<Symmetric8>());
    case Scheme::kRange8:
      return with(Type<Range<8>>());
    case Scheme::kSymmetric4:
      return with(Type<Symmetric4>());
    case Scheme::kRange4:
      return with(Type<Range<4>>());
    case Scheme::kFp8:
      return with(Type<Fp8>());
    case Scheme::kMxfp4:
      return with(Type<Mxfp4>());
    case Scheme::kTable:
      return with(Type<Table>());
    case Scheme::kNone:
      break;
  }
  return false;
}

bool quantize(const Format& format, const void* rows, Dtype dtype, int num_rows, int k,
              bool least_squares, std::byte* panel) {
  if (dtype == Dtype::kBf16) {
    return quantize_as(format, static_cast<const uint16_t*>(rows), num_rows, k, least_squares,
                       panel);
  }
  return quantize_as(format, static_cast<const float*>(rows), num_rows, k, least_squares, panel);
}

}  // namespace
}  // namespace hetero
