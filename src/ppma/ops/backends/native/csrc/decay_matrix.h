// One grid line: log-decays to potentials, and blocks of its decay matrix.
//
// Edge m lies between tokens m - 1 and m; edge 0 lies outside the line and is never read. The decay
// matrix is D[j][l] = product of the decays of the edges between j and l, and log D[j][l] = -|c[j] - c[l]| with the
// potentials c[m] = sum of the logarithms of the decays up to edge m.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace ppma {

// As CUT_BELOW of ppma/ops/decay_matrix.py: such an edge is a cut (decay 0), counted and not summed.
constexpr float kCutBelow = -1e4f;

// The potential of what pads a line.
constexpr float kNowhere = -1e30f;

// The base of the logarithms: 2 where they become decays, e where they are added to scores.
enum class Base { kTwo, kE };

constexpr double per_nat(Base base) { return base == Base::kTwo ? 1.4426950408889634 : 1.0; }

// A running sum of logarithms of decays, cuts left out.
struct RunningPotential {
  double factor;
  double sum = 0.0;
  float cuts = 0.0f;

  explicit RunningPotential(Base base) : factor(per_nat(base)) {}

  void step(float log) {
    bool cut = log < kCutBelow;
    cuts += cut;
    sum += cut ? 0.0 : log * factor;
  }
};

// -|difference| of two potentials given as sums of two floats.
inline Vec minus_distance(Vec high_difference, Vec low_difference) {
  Vec difference = high_difference + low_difference;
  return select(difference < 0.0f, difference, -difference);
}

// The potentials of a line, each as the sum of two floats: the difference of two of them, taken part by part, is right
// to float precision at any length, where a single float would lose the digits that cancel.
class Potentials {
 public:
  // How many floats a line of `n` tokens takes.
  static int64_t size(int64_t n) { return 3 * (n + kLanes); }

  // Reads the natural log-decays log[0], log[stride], ...
  static void fill(float* memory, const float* log, int64_t stride, int64_t n, Base base) {
    float *high = memory, *low = high + n + kLanes, *cuts = low + n + kLanes;
    RunningPotential potential(base);
    for (int64_t m = 0; m < n; ++m) {
      if (m > 0) potential.step(log[m * stride]);
      high[m] = static_cast<float>(potential.sum);
      low[m] = static_cast<float>(potential.sum - high[m]);
      cuts[m] = potential.cuts;
    }
    // Loaded with the last tokens: so far away that the decay is 0.
    for (int64_t m = n; m < n + kLanes; ++m) high[m] = kNowhere, low[m] = cuts[m] = 0.0f;
  }

  // What was filled.
  Potentials(const float* memory, int64_t n)
      : high_(memory), low_(high_ + n + kLanes), cuts_(low_ + n + kLanes), any_cuts_(cuts_[n - 1] > 0.0f) {}

  // The logarithm of D between token j and the kLanes tokens from l on; -inf across a cut.
  Vec log_decay(int64_t j, int64_t l) const {
    Vec log = minus_distance(load(high_ + l) - high_[j], load(low_ + l) - low_[j]);
    return any_cuts_ ? select(load(cuts_ + l) == cuts_[j], log, splat(-__builtin_inff())) : log;
  }

  // D itself, from logarithms to base 2.
  Vec decay(int64_t j, int64_t l) const { return exp2(log_decay(j, l)); }

 private:
  const float* high_;
  const float* low_;
  const float* cuts_;
  bool any_cuts_;
};

// The potentials of all columns of a grid, with the columns in the lanes.
class ColumnPotentials {
 public:
  // How many floats a grid takes.
  static int64_t size(int64_t height, int64_t width) { return 3 * height * (width + kLanes); }

  // Reads natural log-decays `row_stride` and `column_stride` apart.
  static void fill(float* memory, const float* log, int64_t row_stride, int64_t column_stride, int64_t height,
                   int64_t width, Base base) {
    int64_t stride = width + kLanes, part = height * stride;
    for (int64_t c = 0; c < stride; ++c) {
      RunningPotential potential(base);
      for (int64_t i = 0; i < height; ++i) {
        if (i > 0 && c < width) potential.step(log[i * row_stride + c * column_stride]);
        float* at = memory + i * stride + c;
        at[0] = static_cast<float>(potential.sum);
        at[part] = static_cast<float>(potential.sum - at[0]);
        at[2 * part] = potential.cuts;
      }
    }
  }

  // What was filled.
  ColumnPotentials(const float* memory, int64_t height, int64_t width)
      : memory_(memory), stride_(width + kLanes), part_(height * stride_) {}

  // The logarithm of the decay between rows i and k in the kLanes columns from c on; -inf across a cut.
  Vec log_decay(int64_t i, int64_t k, int64_t c) const {
    const float *a = memory_ + i * stride_ + c, *b = memory_ + k * stride_ + c;
    Vec log = minus_distance(load(a) - load(b), load(a + part_) - load(b + part_));
    return select(load(a + 2 * part_) == load(b + 2 * part_), log, splat(-__builtin_inff()));
  }

 private:
  const float* memory_;
  int64_t stride_;
  int64_t part_;
};

// D[j][l] or its logarithm for j in [row, row + rows) and l in [column, column + columns), to rows `stride` apart. Written in
// whole vectors; behind the line's end D is 0, behind the last column otherwise undefined.
inline void log_decay_block(const Potentials& line, int64_t row, int64_t rows, int64_t column, int64_t columns, float* to,
                            int64_t stride) {
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t l = 0; l < columns; l += kLanes) store(to + j * stride + l, line.log_decay(row + j, column + l));
}

// Away from the diagonal a square of kLanes x kLanes is the outer product of the decays from its nearest row to its
// columns and from its rows to that row: both at most 1, so nothing overflows or cancels, and few exponentials are left.
inline void decay_block(const Potentials& line, int64_t row, int64_t rows, int64_t column, int64_t columns, float* to,
                        int64_t stride) {
  for (int64_t first = row; first < row + rows; first += kLanes) {
    int64_t last = (first + kLanes < row + rows ? first + kLanes : row + rows) - 1;
    float from_first[kLanes], from_last[kLanes];
    store(from_first, line.decay(first, first));
    store(from_last, line.decay(last, first));
    for (int64_t l = column; l < column + columns; l += kLanes) {
      float* out = to + (first - row) * stride + (l - column);
      bool before = l + kLanes <= first, behind = l > last;
      if (before || behind) {
        Vec nearest = line.decay(before ? first : last, l);
        const float* steps = before ? from_first : from_last;
        for (int64_t j = 0; j <= last - first; ++j) store(out + j * stride, nearest * steps[j]);
      } else {
        for (int64_t j = 0; j <= last - first; ++j) store(out + j * stride, line.decay(first + j, l));
      }
    }
  }
}

// The whole matrix D of a line from products of its decays, with an exponential for each vector of tokens instead of each
// vector of D. A square of kLanes x kLanes has at most kLanes factors on the diagonal, by a recurrence with the tokens in the
// lanes. Elsewhere D is the decay from a token to the end of its square, times that of the squares in between, times that
// from the beginning of the other's square: two products of at most kLanes factors and one exponential of a sum. All terms of
// the sum have the same sign, so nothing cancels, and a decay of 0 (-inf) needs no special case.
class DecayProducts {
 public:
  // How many floats a line of `n` tokens takes.
  static int64_t size(int64_t n) { return 3 * whole(n) + 3 * whole(whole(n) / kLanes); }

  DecayProducts(float* memory, int64_t n)
      : n_(n),
        squares_(whole(n) / kLanes),
        decays_(memory),
        from_begin_(decays_ + whole(n)),
        to_end_(from_begin_ + whole(n)),
        logs_(to_end_ + whole(n)),
        between_{logs_ + whole(squares_), logs_ + 2 * whole(squares_)} {}

  // Reads the natural log-decays log[0], log[stride], ... and writes rows of whole vectors; behind the line's end D is 0.
  void write(const float* log, int64_t stride, float* to) {
    for (int64_t m = 1; m < n_; ++m) decays_[m] = log[m * stride];
    decays_[0] = 0.0f;  // lies outside the line
    const int64_t width = squares_ * kLanes;
    for (int64_t square = 0; square < squares_; ++square) {
      const int64_t first = square * kLanes, rows = std::min<int64_t>(kLanes, n_ - first);
      float* decays = decays_ + first;
      const Vec logs = load_lanes(decays, static_cast<int>(rows));
      logs_[square] = sum(logs);
      // No decay leads out of the line.
      IntVec inside = lane_index() < static_cast<int>(rows);
      if (square == 0) inside &= lane_index() > 0;
      store(decays, select(inside, exp(logs), Vec{}));
      write_diagonal(decays, rows, first, to + first * width + first, width);
    }
    sum_between(0);
    for (int64_t square = 0; square < squares_; ++square) {
      if (square + 1 < squares_) sum_between(square + 1);  // one ahead: its numbers are on their way while this one is written
      const int64_t first = square * kLanes, rows = std::min<int64_t>(kLanes, n_ - first);
      for (int64_t other = 0; other < squares_; ++other) {
        if (other == square) continue;
        const bool before = other < square;
        Vec nearest = load((before ? to_end_ : from_begin_) + other * kLanes) * between_[square % 2][other];
        const float* steps = (before ? from_begin_ : to_end_) + first;
        float* out = to + first * width + other * kLanes;
        if (rows == kLanes) {
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) store(out + j * width, nearest * steps[j]);
        } else {
          for (int64_t j = 0; j < rows; ++j) store(out + j * width, nearest * steps[j]);
        }
      }
    }
  }

 private:
  static int64_t whole(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

  // Row j of the square is below_j + decays[j + 1] * above_{j + 1}, where below_j has what lies left of the diagonal and
  // above_j what lies right of it, both with the 1 of the diagonal itself.
  void write_diagonal(const float* decays, int64_t rows, int64_t first, float* to, int64_t stride) {
    Vec above[kLanes + 1];
    above[kLanes] = Vec{};
    auto diagonal = [](int j) { return select(lane_index() == j, splat(1.0f), Vec{}); };
#pragma GCC unroll 16
    for (int j = kLanes - 1; j >= 0; --j)
      above[j] = (j + 1 < kLanes ? decays[j + 1] * above[j + 1] : Vec{}) + diagonal(j);
    store(from_begin_ + first, decays[0] * above[0]);
    Vec below{};
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) {
      below = decays[j] * below + diagonal(j);
      if (j < rows) store(to + j * stride, j + 1 < kLanes ? decays[j + 1] * above[j + 1] + below : below);
    }
    store(to_end_ + first, below);
  }

  // The decays of what lies between a square and each of the others.
  void sum_between(int64_t square) {
    float* between = between_[square % 2];
    double log = 0.0;
    for (int64_t other = square + 1; other < squares_; ++other) {
      between[other] = static_cast<float>(log);
      log += logs_[other];
    }
    log = 0.0;
    for (int64_t other = square - 1; other >= 0; --other) {
      between[other] = static_cast<float>(log);
      log += logs_[other];
    }
    between[square] = 0.0f;
    for (int64_t other = 0; other < squares_; other += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, squares_ - other));
      store(between + other, exp(load_lanes(between + other, lanes)));
    }
  }

  const int64_t n_, squares_;
  float *decays_, *from_begin_, *to_end_;  // of the tokens: of their own edge, and from and to the ends of their square
  float *logs_, *between_[2];              // of the squares; for the present one and the next
};

// The gradient of log D[j][l .. l + kLanes) with the sign with which the potential of l receives it and that of j loses
// it: from the positions and not from the potentials, which are equal where a decay is 1.
inline Vec signed_by_position(Vec gradient, int64_t j, int64_t l) {
  IntVec distance = lane_index() + static_cast<int>(l - j);
  return select(distance < 0, -gradient, select(distance > 0, gradient, Vec{}));
}

// From what the potentials of a line receive to the gradient of its log-decays: edge m moves the potentials of all
// tokens from m on. Both are strided.
template <class Float>
inline void log_decay_gradient(const Float* potentials, int64_t potential_stride, const float* log, int64_t log_stride,
                               int64_t n, float* to, int64_t stride) {
  double total = 0.0;
  for (int64_t m = n - 1; m > 0; --m) {
    total += potentials[m * potential_stride];
    // Across a cut the mask is 0 and stays 0; the sums are 0 there only up to rounding.
    to[m * stride] = log[m * log_stride] < kCutBelow ? 0.0f : static_cast<float>(total);
  }
  to[0] = 0.0f;
}

}  // namespace ppma
