// The bidirectional scan of one row: R v = left + right, where left[j] = alpha[j] left[j-1] + v[j] runs from the left
// and right[j] = alpha[j+1] (right[j+1] + v[j+1]) from the right.
//
// A first sweep from the right keeps its states in registers and writes them down at every kChunk-th pixel only; the
// second, from the left, repeats the states of a chunk in registers and finishes its pixels. So nothing of the size of
// the row is written but the results.
#pragma once

#include "plane.h"

namespace ppma {

// N values at one pixel with the states on both sides of it, and the left-hand states of the pixel before.
template <int N>
struct Scanned {
  Vec value[N];
  Vec left[N];
  Vec left_before[N];
  Vec right[N];

  PPMA_INLINE Vec result(int n) const { return left[n] + right[n]; }
};

template <int N>
class RowScan {
 public:
  static int64_t scratch_floats(int64_t width) { return chunks(width) * N * kLanes; }

  // `values(j, out)` gives the N vectors at pixel j; `finish(j, scanned)` is called once for each pixel, from the left,
  // and may overwrite what values(j) reads, which is not read again.
  template <class Values, class Finish>
  PPMA_INLINE static void run(const float* alpha, int64_t width, float* scratch, Values values, Finish finish) {
    int64_t whole = width / kChunk * kChunk;
    float* border = scratch + scratch_floats(width);
    Vec right[N] = {};
    for (int64_t j = width; j > whole;) border = pass<1>(alpha, j -= 1, values, right, border);
    for (int64_t j = whole; j > 0;) border = pass<kChunk>(alpha, j -= kChunk, values, right, border);
    Vec left[N] = {};
    for (int64_t j = 0; j < whole; j += kChunk) border = meet<kChunk>(alpha, j, values, finish, left, border);
    for (int64_t j = whole; j < width; ++j) border = meet<1>(alpha, j, values, finish, left, border);
  }

 private:
  static constexpr int kChunk = 2;

  static int64_t chunks(int64_t width) { return width / kChunk + width % kChunk; }

  template <class Values>
  PPMA_INLINE static void step(float alpha, int64_t j, Values& values, Vec (&right)[N]) {
    Vec value[N];
    values(j, value);
    unrolled<N>([&](auto n) PPMA_INLINE { right[n] = alpha * (right[n] + value[n]); });
  }

  template <int chunk, class Values>
  PPMA_INLINE static float* pass(const float* alpha, int64_t j, Values& values, Vec (&right)[N], float* border) {
    border -= N * kLanes;
    unrolled<N>([&](auto n) PPMA_INLINE { store(border + n * kLanes, right[n]); });
    unrolled<chunk>([&](auto q) PPMA_INLINE {
      constexpr int p = chunk - 1 - q;
      step(alpha[j + p], j + p, values, right);
    });
    return border;
  }

  template <int chunk, class Values, class Finish>
  PPMA_INLINE static float* meet(const float* alpha, int64_t j, Values& values, Finish& finish, Vec (&left)[N],
                                 float* border) {
    Vec right[chunk][N];
    unrolled<N>([&](auto n) PPMA_INLINE { right[chunk - 1][n] = load(border + n * kLanes); });
    unrolled<chunk - 1>([&](auto q) PPMA_INLINE {
      constexpr int p = chunk - 1 - q;
      unrolled<N>([&](auto n) PPMA_INLINE { right[p - 1][n] = right[p][n]; });
      step(alpha[j + p], j + p, values, right[p - 1]);
    });
    unrolled<chunk>([&](auto p) PPMA_INLINE {
      Scanned<N> scanned;
      values(j + p, scanned.value);
      unrolled<N>([&](auto n) PPMA_INLINE {
        scanned.left_before[n] = left[n];
        scanned.left[n] = left[n] = alpha[j + p] * left[n] + scanned.value[n];
        scanned.right[n] = right[p][n];
      });
      finish(j + p, scanned);
    });
    return border + N * kLanes;
  }
};

}  // namespace ppma
