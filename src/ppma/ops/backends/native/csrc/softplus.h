// The activations of the decay heads.
#pragma once

#include "simd.h"

namespace ppma {

// log(1 + e^x) with a relative error of at most 4e-7; NaN for NaN.
//
// It is max(x, 0) + log1p(t) with t = e^-|x|, and log1p(t) = 2 artanh(s) with s = t / (2 + t) <= 1/3, whose series in s^2
// has a remainder below 1e-9 after nine terms.
inline Vec softplus(Vec x) {
  Vec t = exp(-max(x, -x));
  Vec s = t / (t + 2.0f), square = s * s;
  Vec p = splat(1.0f / 17);
  p = p * square + 1.0f / 15;
  p = p * square + 1.0f / 13;
  p = p * square + 1.0f / 11;
  p = p * square + 1.0f / 9;
  p = p * square + 1.0f / 7;
  p = p * square + 1.0f / 5;
  p = p * square + 1.0f / 3;
  p = p * square + 1.0f;
  return max(x, Vec{}) + 2.0f * s * p;
}

}  // namespace ppma
