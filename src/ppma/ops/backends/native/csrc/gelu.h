// GELU with the exact normal distribution, and its derivative.
#pragma once

#include "simd.h"

namespace ppma {

struct Gelu {
  Vec value;
  Vec slope;
};

// value = x P(X <= x) for a normal X, with an absolute error of at most 3e-7 * max(1, |x|); slope is its derivative.
//
// The tail is P(X <= -|x|) = t p(t) exp(-x^2 / 2) with t = 1 / (1 + 0.4 |x| / sqrt 2) and a minimax polynomial p of
// degree 8 (relative error 6e-8 before rounding), so that small results far left keep their digits. Beyond kFlat
// value and slope are within 1e-37 of their limits, and exp(-x^2 / 2) would be no normal number.
inline Gelu gelu(Vec x) {
  constexpr float kFlat = 13.2f;
  Vec magnitude = min(max(x, -x), splat(kFlat));
  Vec t = reciprocal(0x1.21a186p-2f * magnitude + 1.0f);
  Vec p = splat(0x1.4654dcp-6f);
  p = p * t - 0x1.11127cp-4f;
  p = p * t + 0x1.1c108ap-5f;
  p = p * t + 0x1.adf27cp-5f;
  p = p * t + 0x1.15c144p-5f;
  p = p * t + 0x1.96aed8p-4f;
  p = p * t + 0x1.9ab224p-4f;
  p = p * t + 0x1.d026f4p-4f;
  p = p * t + 0x1.ce1338p-4f;
  Vec bell = exp2_bounded(magnitude * magnitude * (-0.5f * kLog2E));
  Vec tail = p * t * bell;
  constexpr float kInverseSqrtTwoPi = 0x1.988454p-2f;
  Vec slope_left = tail - magnitude * bell * kInverseSqrtTwoPi;
  return {max(x, Vec{}) - magnitude * tail, select(x < 0.0f, slope_left, 1.0f - slope_left)};
}

}  // namespace ppma
