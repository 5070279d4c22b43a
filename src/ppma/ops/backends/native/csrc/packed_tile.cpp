#include "packed_tile.h"

#include "gelu.h"

namespace ppma {

namespace {

// Of the last vector the first `lanes` outputs exist, all unless kEdge.
template <int M, int N, bool kEdge>
__attribute__((noinline)) void sum_tile(const Tile& tile, int lanes) {
  auto read = [&](const float* from, int n) {
    return kEdge && n == N - 1 ? load_part(from + n * kLanes, lanes) : load(from + n * kLanes);
  };
  auto write = [&](float* to, int n, Vec x) {
    if (kEdge && n == N - 1)
      store_part(to + n * kLanes, x, lanes);
    else
      store(to + n * kLanes, x);
  };
  float* out = tile.out;
  const int64_t out_stride = tile.out_stride, x_stride = tile.x_stride;
  Vec sums[M][N];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    Vec bias = tile.bias ? read(tile.bias, n) : Vec{};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      if (tile.resume)
        sums[m][n] = read(out + m * out_stride, n);
      else if (tile.residual)
        sums[m][n] = bias + read(tile.residual + m * tile.residual_stride, n);
      else
        sums[m][n] = bias;
    }
  }
  const float* weights = tile.weights;
  for (int64_t segment = 0; segment < tile.segments; ++segment) {
    // Rows 0, 1, 2 and 3, 4, 5 are addressed from one pointer each: 1 and 2 are factors that an address can have.
    const float* left[(M + 2) / 3];
#pragma GCC unroll 4
    for (int third = 0; third < (M + 2) / 3; ++third)
      left[third] = tile.x + segment * tile.segment_stride + 3 * third * x_stride;
#pragma GCC unroll 4
    for (int64_t k = 0; k < tile.depth; ++k, weights += kPanel) {
      Vec of_weights[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) of_weights[n] = load(weights + n * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        Vec of_x = splat(left[m / 3][m % 3 * x_stride + k]);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sums[m][n] += of_x * of_weights[n];
      }
    }
  }
  // All sums are stored first: constants of the activation would push them out of their registers.
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) write(out + m * out_stride, n, sums[m][n]);
  }
  if (tile.gelu) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) write(out + m * out_stride, n, gelu(read(out + m * out_stride, n)).value);
  }
}

// Calls `sum_tile` for M of 1 .. kTileRows.
template <int N, bool kEdge, int M = kTileRows>
void run_rows(const Tile& tile, int64_t rows, int lanes) {
  if constexpr (M > 0) {
    if (rows == M)
      sum_tile<M, N, kEdge>(tile, lanes);
    else
      run_rows<N, kEdge, M - 1>(tile, rows, lanes);
  }
}

}  // namespace

void run_tile(const Tile& tile, int64_t rows, int64_t outputs) {
  int lanes = static_cast<int>(outputs > kLanes ? outputs - kLanes : outputs);
  if (outputs >= kPanel)
    run_rows<kPanelVectors, false>(tile, rows, kLanes);
  else if (outputs > kLanes)
    run_rows<kPanelVectors, true>(tile, rows, lanes);
  else
    run_rows<1, true>(tile, rows, lanes);
}

}  // namespace ppma
