// Scans of a plane, forward.
//
// With R the decay matrices of all rows and K those of all columns: V2H is R K x, H2V is K R x, and a scan of columns
// alone is K x. K is a recurrence down every column plus one up every column, and R is linear, so the result is the sum
// of what comes from above (with the row itself) and from below, each found in one walk through the rows that carries a
// single row of column states for both paths:
//
//     inwards:   u = R x;  f = beta f + x;  F = beta F + u;  y  = R f        + F
//     outwards:  u = R x;                                    y += R (beta g) + beta G;  g = beta g + x;  G = beta G + u
#pragma once

#include "row_scan.h"

namespace ppma {

enum Mode { kColumns = 0, kV2H = 1, kH2V = 2, kBoth = 3 };

// body(mode) with the mode, one of `modes`, as a constant.
template <int... modes, class Body>
int with_mode(int64_t mode, Body body) {
  int result = 0;
  ((mode == modes ? static_cast<void>(result = body(std::integral_constant<int, modes>{})) : void()), ...);
  return result;
}

template <int mode>
struct PlaneScan {
  static constexpr bool kScansX = mode != kH2V;  // by columns
  static constexpr bool kScansU = (mode & kH2V) != 0;
  static constexpr bool kRowsLast = (mode & kV2H) != 0;
  static constexpr int kStates = int(kScansX) + int(kScansU);
  static constexpr int kInRow = int(kScansU) + int(kRowsLast);  // what a row scan carries: x for u, the scanned x

  struct Space {
    Row in, out;
    float* chunks;

    Space(Arena& arena, int64_t width)
        : in(take_row(arena, width)),
          out(take_row(arena, width)),
          chunks(arena.take(RowScan<std::max(kInRow, 1)>::scratch_floats(width))) {}
  };

  // One row of `width` pixels. `states` of the row before it become those of this row; `beta`: the edges between the two.
  // result(j, value) receives each pixel.
  template <bool inwards, class X, class Result>
  PPMA_INLINE static void step(X x, const float* alpha, const float* beta, int64_t width, StateRow<kStates> states,
                               const Space& space, Result result) {
    auto values = [&](int64_t j, Vec* value) PPMA_INLINE {
      Vec here = x(j);
      if constexpr (kScansU) value[0] = here;
      if constexpr (kRowsLast) {
        Vec before = beta[j] * states(0, j);
        value[kScansU] = inwards ? before + here : before;
      }
    };
    auto finish = [&](int64_t j, const Scanned<std::max(kInRow, 1)>& scanned) PPMA_INLINE {
      Vec total{};
      if constexpr (kRowsLast) total = scanned.result(kScansU);
      if constexpr (kScansX) {
        Vec before = beta[j] * states(0, j);
        Vec after = before + x(j);
        states.put(0, j, after);
        if constexpr (!kRowsLast) total = inwards ? after : before;
      }
      if constexpr (kScansU) {
        Vec before = beta[j] * states(kScansX, j);
        Vec after = before + scanned.result(0);
        states.put(kScansX, j, after);
        total += inwards ? after : before;
      }
      result(j, total);
    };
    if constexpr (kInRow > 0) {
      RowScan<kInRow>::run(alpha, width, space.chunks, values, finish);
    } else {
      for (int64_t j = 0; j < width; ++j) finish(j, {});
    }
  }
};

}  // namespace ppma
