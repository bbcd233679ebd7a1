// The same for codes that are small floating-point numbers or entries of a table.
#pragma once

#include "kernels/choose.inl.h"

namespace hetero {
namespace {

// Float e4m3, one scale for all columns.
struct Fp8 {
  explicit Fp8(const Format&) {}

  static constexpr float kMost = 448.0f;

  static Choice choose(const Lanes& lanes, bool) {
    // All columns of the panel, from whichever of them the lanes begin with.
    const float* row = lanes.weights - lanes.first_column;
    F most = V::zero();
    for (int k = 0; k < lanes.count; ++k, row += kPanel) {
      for (int i = 0; i < kPanel; i += V::kLanes) most = V::max(V::abs(V::load(row + i)), most);
    }
    const float scale = V::hmax(most) / kMost;
    // The kernels multiply the scale by 256 and the smallest codes by it.
    return {V::set1(scale < 1e-35f ? 0.0f : scale), V::zero()};
  }
  static I encode(F w, const Choice& choice, F inverse) {
    const F v = V::select_gt(choice.scale, V::zero(), V::mul(w, inverse), V::zero());
    const F magnitude = V::min(V::abs(v), V::set1(kMost));
    // Under 2^-6 there are multiples of 2^-9; above, three bits of mantissa, ties to even.
    const I low = Codes::integer(nearest(V::mul(magnitude, V::set1(512.0f))));
    const I bits = Codes::bits(magnitude);
    const I odd = Codes::both(Codes::right<20>(bits), Codes::set(1));
    const I up = Codes::add(bits, Codes::add(odd, Codes::set(0x7ffff)));
    const I high = Codes::add(Codes::right<20>(up), Codes::set(-(120 << 3)));
    const F code =
        V::select_gt(V::set1(0x1p-6f), magnitude, Codes::number(low), Codes::number(high));
    const I sign = Codes::left<7>(Codes::right<31>(Codes::bits(w)));
    return Codes::add(Codes::bits(code), sign);
  }
};

// e2m1 with a power of two. The largest weight's exponent less that of the largest code.
struct Mxfp4 {
  explicit Mxfp4(const Format&) {}

  // The magnitude of the nearest e2m1, ties to the even code; beyond 6 it is 6.
  static F magnitude(F v) {
    const F m = V::min(V::abs(v), V::set1(6.0f)), two = V::set1(2.0f), four = V::set1(4.0f);
    const F half = V::set1(0.5f), one = V::set1(1.0f);
    const F step = V::select_gt(two, m, half, V::select_gt(four, m, one, two));
    const F inverse = V::select_gt(two, m, two, V::select_gt(four, m, one, half));
    return V::mul(nearest(V::mul(m, inverse)), step);
  }

  static Choice choose(const Lanes& lanes, bool least_squares) {
    const F most = lanes.largest();
    const I exponent = Codes::both(Codes::bits(most), Codes::set(0x7f800000));
    const auto power = [&](int less) {
      return Codes::number(Codes::add(exponent, Codes::set(-(less << 23))));
    };
    F best = power(2);
    if (least_squares) {
      Search search{lanes, [](F w, F scale, F inverse) {
                      return V::mul(scale, V::copysign(magnitude(V::mul(w, inverse)), w));
                    }};
      search.best = best;
      constexpr int kLess[] = {2, 3, 1};
      for (const int less : kLess) search.offer(power(less));
      best = search.best;
    }
    return {V::select_gt(V::set1(0x1p-123f), most, V::zero(), best), V::zero()};
  }
  static I encode(F w, const Choice& choice, F inverse) {
    const F v = V::select_gt(choice.scale, V::zero(), V::mul(w, inverse), V::zero());
    // Twice the magnitude is 0, 1, 2, 3, 4, 6, 8 or 12.
    const F twice = V::mul(magnitude(v), V::set1(2.0f)), one = V::set1(1.0f);
    const auto above = [&](float least) {
      return V::select_gt(twice, V::set1(least), one, V::zero());
    };
    F code = V::add(V::min(twice, V::set1(4.0f)), above(5.0f));
    code = V::add(V::add(code, above(7.0f)), above(10.0f));
    return Codes::integer(V::add(code, V::select_gt(V::zero(), v, V::set1(8.0f), V::zero())));
  }
};

// The nearest entry of the format's table, which ascends.
class Table {
 public:
  explicit Table(const Format& format) : values_(Codes::table(format.table)) {
    for (int i = 0; i < 15; ++i) middles_[i] = 0.5f * (format.table[i] + format.table[i + 1]);
    middles_[15] = __builtin_inff();
  }

  Choice choose(const Lanes& lanes, bool least_squares) const {
    const F most = lanes.largest();
    F best = V::round_bf16(most);
    if (least_squares) {
      const Codes::Table middles = Codes::table(middles_);
      Search search{lanes, [&](F w, F scale, F inverse) {
                      const I entry = nearest_entry(V::mul(w, inverse), middles);
                      return V::mul(scale, Codes::pick(entry, values_));
                    }};
      search.best = best;
      for (int i = 0; i < kNumFactors; ++i) {
        search.offer(V::round_bf16(V::mul(most, factor_of(i))));
      }
      best = search.best;
    }
    return {V::select_gt(V::set1(kLeastScale), most, V::zero(), best), V::zero()};
  }
  I encode(F w, const Choice& choice, F inverse) const {
    const F v = V::select_gt(choice.scale, V::zero(), V::mul(w, inverse), V::zero());
    return nearest_entry(v, Codes::table(middles_));
  }

 private:
  // How many of the values halfway between neighbours lie below v.
  static I nearest_entry(F v, const Codes::Table& middles) {
    I entry = Codes::set(0);
    for (int step = 8; step > 0; step /= 2) {
      const F middle = Codes::pick(Codes::add(entry, Codes::set(step - 1)), middles);
      const F more = V::select_gt(v, middle, Codes::number(Codes::set(step)), V::zero());
      entry = Codes::add(entry, Codes::bits(more));
    }
    return entry;
  }

  Codes::Table values_;
  alignas(64) float middles_[16];
};

}  // namespace
}  // namespace hetero
