// One grid line: log-decays to decays and potentials.
//
// Edge m lies between tokens m - 1 and m; edge 0 lies outside the line, and what stands there is never read.
#pragma once

#include <cmath>
#include <cstdint>

namespace ppma {

// As CUT_BELOW of ppma/ops/lines.py: such an edge is a cut (decay 0), counted and not summed.
constexpr float kCutBelow = -1e4f;

// Potentials in units of log 2, each as the sum of two floats: the difference of two of them, taken part by part, is
// right to float precision at any length, where one float would lose the digits that cancel.
struct Potentials {
  float* high;  // n floats each
  float* low;
  float* cuts;    // how many edges of decay 0 lie before each token
  bool any_cuts;

  // Reads the log-decays log[0], log[stride], ...
  void fill(const float* log, int64_t stride, int64_t n) {
    double sum = 0.0;
    float count = 0.0f;
    for (int64_t m = 0; m < n; ++m) {
      if (m > 0) {
        float edge = log[m * stride];
        if (edge < kCutBelow) {
          count += 1.0f;
        } else {
          sum += edge;
        }
      }
      double potential = sum * 1.4426950408889634;
      high[m] = static_cast<float>(potential);
      low[m] = static_cast<float>(potential - high[m]);
      cuts[m] = count;
    }
    any_cuts = count > 0.0f;
  }
};

}  // namespace ppma
