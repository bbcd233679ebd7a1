// From K-quants (formats/kquant.h) to bf16 weights, which every kernel multiplies.
#pragma once

#include "kernels/decode.inl.h"

namespace hetero {
namespace {

// Values of the four bits that pick() looks at: themselves, and what the bits above a code add.
struct KTables {
  float low[16], one[4][16], two[2][16];
};

constexpr KTables k_tables() {
  KTables tables{};
  for (int i = 0; i < 16; ++i) {
    tables.low[i] = static_cast<float>(i);
    for (int bit = 0; bit < 4; ++bit) {
      tables.one[bit][i] = static_cast<float>((i >> bit & 1) * 16);
    }
    for (int half = 0; half < 2; ++half) {
      tables.two[half][i] = static_cast<float>((i >> (2 * half) & 3) * 16 - 32);
    }
  }
  return tables;
}
constexpr KTables kTables = k_tables();

// Two vectors of columns of one block.
template <KQuant kKind>
class KBlock {
 public:
  KBlock(const std::byte* block, int column)
      : block_(block), column_(column), low_(Codes::table(kTables.low)) {
    for (int i = 0; i < 4; ++i) {
      above_[i] = Codes::table(kKind == KQuant::kQ5 ? kTables.one[i] : kTables.two[i % 2]);
    }
  }

  // The values of K from `k` to k + 31: calls emit(even, odd) for every pair.
  template <class Emit>
  void slab(int k, const Emit& emit) const {
    for (int group = k; group < k + 32; group += kLayout.group) {
      const Scales scales = scales_of(group / kLayout.group);
      for (int step = group - k; step < group - k + kLayout.group; step += 8) {
        eight(block_ + (kLayout.low + kLayout.high) * (k / 32), step, scales, emit);
      }
    }
  }

 private:
  static constexpr KLayout kLayout{kKind};

  Scales scales_of(int group) const {
    Scales scales;
    const std::byte* bytes = block_ + kLayout.scales + kLayout.group_bytes * group;
    const auto* supers = reinterpret_cast<const uint16_t*>(block_ + kLayout.supers);
    for (int i = 0; i < 2; ++i) {
      const int at = column_ + i * V::kLanes;
      scales.scale[i] = V::mul(Codes::scale_f16(supers + at), Codes::from_int8(bytes + at));
      if (kLayout.has_min) {
        scales.min[i] = V::sub(V::zero(), V::mul(Codes::scale_f16(supers + kPanel + at),
                                                 Codes::from_int8(bytes + kPanel + at)));
      }
    }
    return scales;
  }

  // Eight values from `step` on; a word that is read some bytes further on has its codes in the
  // lowest bits, and what comes into its highest bits is not looked at.
  template <class Emit>
  void eight(const std::byte* slab, int step, const Scales& scales, const Emit& emit) const {
    for (int pair = 0; pair < 4; ++pair) {
      V::F values[2][2];
      for (int i = 0; i < 2; ++i) {
        const int at = column_ + i * V::kLanes;
        const Codes::I low =
            Codes::load_words(slab + (step / 8 * kPanel + at) * sizeof(uint32_t) + pair);
        values[0][i] = Codes::pick(low, low_);
        values[1][i] = Codes::pick(Codes::right<4>(low), low_);
        if constexpr (kKind != KQuant::kQ4) {
          const Codes::I high = above(slab + kLayout.low, step, pair, at);
          const int first = kKind == KQuant::kQ5 ? pair % 2 * 2 : 0;
          values[0][i] = V::add(values[0][i], Codes::pick(high, above_[first]));
          values[1][i] = V::add(values[1][i], Codes::pick(high, above_[first + 1]));
        }
      }
      for (auto& value : values) {
        for (int i = 0; i < 2; ++i) {
          value[i] = kLayout.has_min ? V::fma(value[i], scales.scale[i], scales.min[i])
                                     : V::mul(value[i], scales.scale[i]);
          value[i] = Codes::bump_even(value[i]);
        }
      }
      emit(values[0], values[1]);
    }
  }

  // Words whose lowest four bits hold the upper bits of a pair's codes.
  static Codes::I above(const std::byte* high, int step, int pair, int at) {
    if constexpr (kKind == KQuant::kQ5) {
      const Codes::I words = Codes::load_words(high + at * sizeof(uint32_t) + step / 8);
      return pair < 2 ? words : Codes::right<4>(words);
    }
    const std::byte* from = high + (step / 16 * kPanel + at) * sizeof(uint32_t);
    const Codes::I words = Codes::load_words(from + step % 16 / 4 + pair / 2);
    return pair % 2 == 0 ? words : Codes::right<4>(words);
  }

  const std::byte* block_;
  int column_;
  Codes::Table low_;
  Codes::Table above_[4];
};

template <KQuant kKind>
struct KBlocks {
  // `count` values of K from `first` on (both multiples of 32) of a panel -> [count/2][32][2].
  // Meanwhile it fetches what lies `ahead` bytes further.
  static void decode(const std::byte* panel, int first, int count, ptrdiff_t ahead, uint16_t* out) {
    constexpr KLayout kLayout(kKind);
    constexpr size_t kShare = kLayout.end / (kSuper / kPanel);  // of a block, for 32 values
    for (int k = first; k < first + count; k += kPanel, out += kPanel * kPanel) {
      const std::byte* block = panel + kLayout.end * (k / kSuper);
      for (size_t byte = 0; byte < kShare; byte += 64) {
        Codes::prefetch(block + kShare * (k % kSuper / kPanel) + byte + ahead);
      }
      for (int column = 0; column < kPanel; column += kSpan) {
        uint16_t* to = out + 2 * column;
        KBlock<kKind>(block, column).slab(k % kSuper, [&](const V::F* even, const V::F* odd) {
          Codes::store_pairs(to, even[0], odd[0]);
          Codes::store_pairs(to + kSpan, even[1], odd[1]);
          to += 2 * kPanel;
        });
      }
    }
  }
};

// body(weigh) with weigh(panel, first, count, ahead, out): decode_blocks of `kind`.
template <class Body>
inline void by_kquant(KQuant kind, const Body& body) {
  const auto with = [&](auto blocks) {
    body([&](const std::byte* panel, int first, int count, ptrdiff_t ahead, uint16_t* out) {
      decltype(blocks)::decode(panel, first, count, ahead, out);
    });
  };
  switch (kind) {
    case KQuant::kNone:
      return;
    case KQuant::kQ4:
      return with(KBlocks<KQuant::kQ4>());
    case KQuant::kQ5:
      return with(KBlocks<KQuant::kQ5>());
    case KQuant::kQ6:
      return with(KBlocks<KQuant::kQ6>());
  }
}

}  // namespace
}  // namespace hetero
