// How a group of weights becomes a scale and codes, for every scheme of formats/format.h.
//
// The lanes are columns of the panel, so that nothing is summed across lanes and every instruction
// set gives the same bits.
#pragma once

#include "kernels/decode.inl.h"

namespace hetero {
namespace {

using F = V::F;
using I = Codes::I;

// Under this a reciprocal overflows: such groups are zero.
constexpr float kLeastScale = 1e-37f;

// One vector of columns of a group: [count][32] weights, from its first column on.
struct Lanes {
  const float* weights;
  int first_column;
  int count;

  F at(int k) const { return V::load(weights + k * kPanel); }
  template <class Join>
  F reduce(F from, const Join& join) const {
    for (int k = 0; k < count; ++k) from = join(from, at(k));
    return from;
  }
  F largest() const {
    return reduce(V::zero(), [](F most, F w) { return V::max(V::abs(w), most); });
  }
};

// To nearest, ties to even; |v| < 2^22.
inline F nearest(F v) {
  const F magic = V::set1(12582912.0f);
  return V::sub(V::add(v, magic), magic);
}
inline F clamped(F v, float least, float most) {
  return V::min(V::max(v, V::set1(least)), V::set1(most));
}

// Factors of the scale that the maximum would give, from 1.0 down: the candidates of the search for
// the least squared error.
constexpr int kNumFactors = 24;
inline F factor_of(int i) { return V::set1(1.0f - 0.02f * static_cast<float>(i)); }

// Of the scales that candidates offer, the one with the least sum of squared errors; value(w,
// scale, 1 / scale) is what w becomes.
template <class Value>
struct Search {
  const Lanes& lanes;
  Value value;
  F best = V::zero();
  F least_error = V::set1(__builtin_inff());

  void offer(F scale) {
    const F inverse = V::div(V::set1(1.0f), scale);
    F sum = V::zero();
    for (int k = 0; k < lanes.count; ++k) {
      const F w = lanes.at(k);
      const F error = V::sub(w, value(w, scale, inverse));
      sum = V::add(sum, V::mul(error, error));
    }
    best = V::select_gt(least_error, sum, scale, best);
    least_error = V::select_gt(least_error, sum, sum, least_error);
  }
};
template <class Value>
Search(const Lanes&, Value) -> Search<Value>;

// What a group gets: numbers that its kind of scale holds. Where `scale` is zero, codes stand for
// nothing.
struct Choice {
  F scale, min;
  F inverse() const {
    const F one = V::set1(1.0f);
    return V::div(one, V::select_gt(V::abs(scale), V::zero(), scale, one));
  }
};

// Scale::kOdd: ten significant bits, the last always 1.
inline F odd_scale(F v) {
  const I bits = Codes::both(Codes::bits(v), Codes::set(static_cast<int>(0xffff8000u)));
  const F greatest = Codes::number(Codes::set((0xfeff << 15) | 0x4000));
  return V::min(Codes::number(Codes::add(bits, Codes::set(0x4000))), greatest);
}

// Five significant bits, ties to even.
inline F short_scale(F v) {
  const I bits = Codes::bits(v);
  const I odd = Codes::both(Codes::right<19>(bits), Codes::set(1));
  const I up = Codes::add(bits, Codes::add(odd, Codes::set(0x3ffff)));
  return Codes::number(Codes::both(up, Codes::set(static_cast<int>(0xfff80000u))));
}

// Integers from -127 to 127.
struct Symmetric8 {
  explicit Symmetric8(const Format&) {}

  static constexpr float kLeast = -127.0f, kMost = 127.0f;

  static Choice choose(const Lanes& lanes, bool least_squares) {
    const F base = V::div(lanes.largest(), V::set1(kMost));
    F best = odd_scale(base);
    if (least_squares) {
      Search search{lanes, [](F w, F scale, F inverse) {
                      return V::mul(scale, nearest(clamped(V::mul(w, inverse), kLeast, kMost)));
                    }};
      search.best = best;
      for (int i = 0; i < kNumFactors; ++i) search.offer(odd_scale(V::mul(base, factor_of(i))));
      best = search.best;
    }
    return {V::select_gt(V::set1(kLeastScale), base, V::zero(), best), V::zero()};
  }
  static I encode(F w, const Choice&, F inverse) {
    return Codes::integer(nearest(clamped(V::mul(w, inverse), kLeast, kMost)));
  }
};

// Integers from -8 to 7; the weight of greatest magnitude becomes -8, whatever its sign.
struct Symmetric4 {
  explicit Symmetric4(const Format&) {}

  static constexpr float kLeast = -8.0f, kMost = 7.0f;

  static Choice choose(const Lanes& lanes, bool least_squares) {
    const F extreme = lanes.reduce(
        V::zero(), [](F most, F w) { return V::select_gt(V::abs(w), V::abs(most), w, most); });
    const F base = V::div(extreme, V::set1(kLeast));
    F best = short_scale(base);
    if (least_squares) {
      Search search{lanes, [](F w, F scale, F inverse) {
                      return V::mul(scale, nearest(clamped(V::mul(w, inverse), kLeast, kMost)));
                    }};
      search.best = best;
      // Scales of five bits are 3 to 6 % apart: larger ones than the maximum's, and of either sign,
      // are candidates too.
      for (int i = -8; i < kNumFactors; ++i) {
        const F scale = short_scale(V::mul(base, factor_of(i)));
        search.offer(scale);
        search.offer(V::sub(V::zero(), scale));
      }
      best = search.best;
    }
    return {V::select_gt(V::set1(kLeastScale), V::abs(base), V::zero(), best), V::zero()};
  }
  static I encode(F w, const Choice&, F inverse) {
    const F code = nearest(clamped(V::mul(w, inverse), kLeast, kMost));
    return Codes::integer(V::add(code, V::set1(8.0f)));
  }
};

// Integers of kBits around a middle, which lies half a step above the mean of the ends. A group of
// one value is its middle alone.
template <int kBits>
struct Range {
  explicit Range(const Format&) {}

  static constexpr float kLeast = -static_cast<float>(1 << (kBits - 1)), kMost = -kLeast - 1.0f;

  static F middle(F low, F high, F scale) {
    const F half = V::set1(0.5f);
    return V::round_bf16(
        V::add(V::add(V::mul(half, low), V::mul(half, high)), V::mul(half, scale)));
  }
  static F code(F w, F offset, F inverse) {
    return nearest(clamped(V::mul(V::sub(w, offset), inverse), kLeast, kMost));
  }

  static Choice choose(const Lanes& lanes, bool least_squares) {
    const F low = lanes.reduce(lanes.at(0), [](F a, F w) { return V::min(w, a); });
    const F high = lanes.reduce(lanes.at(0), [](F a, F w) { return V::max(w, a); });
    const F steps = V::set1(kMost - kLeast);
    const F base = V::sub(V::div(high, steps), V::div(low, steps));
    F best = V::round_bf16(base);
    if (least_squares) {
      Search search{lanes, [&](F w, F scale, F inverse) {
                      const F offset = middle(low, high, scale);
                      return V::add(V::mul(scale, code(w, offset, inverse)), offset);
                    }};
      search.best = best;
      for (int i = 0; i < kNumFactors; ++i) {
        search.offer(V::round_bf16(V::mul(base, factor_of(i))));
      }
      best = search.best;
    }
    best = V::select_gt(V::set1(kLeastScale), best, V::zero(), best);
    return {best, middle(low, high, best)};
  }
  static I encode(F w, const Choice& choice, F inverse) {
    const F q = V::select_gt(choice.scale, V::zero(), code(w, choice.min, inverse), V::zero());
    return Codes::integer(kBits == 4 ? V::sub(q, V::set1(kLeast)) : q);
  }
};

}  // namespace
}  // namespace hetero
