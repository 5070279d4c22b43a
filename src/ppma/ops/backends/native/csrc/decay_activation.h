// The activations of the decay heads.
#pragma once

#include "simd.h"

namespace ppma {

struct Activation {
  Vec value;
  Vec slope;
};

// softplus, log(1 + e^x), with a relative error of at most 4e-7, or ReLU; and the derivative. NaN for NaN.
//
// Softplus is max(x, 0) + log1p(t) with t = e^-|x|, and log1p(t) = 2 artanh(s) with s = t / (2 + t) <= 1/3, whose series in
// s^2 has a remainder below 2e-8 after seven terms.
inline Activation decay_activation(Vec x, bool softplus) {
  // `x > 0 ? x : 0` would make a decay of NaN.
  Vec positive = select(x < 0.0f, Vec{}, x);
  if (!softplus) return {positive, select(x <= 0.0f, Vec{}, splat(1.0f))};
  Vec t = exp(-max(x, -x));
  Vec s = t / (t + 2.0f), square = s * s;
  Vec p = splat(1.0f / 13);
  p = p * square + 1.0f / 11;
  p = p * square + 1.0f / 9;
  p = p * square + 1.0f / 7;
  p = p * square + 1.0f / 5;
  p = p * square + 1.0f / 3;
  p = p * square + 1.0f;
  return {positive + 2.0f * s * p, select(x < 0.0f, t, splat(1.0f)) / (t + 1.0f)};
}

}  // namespace ppma
