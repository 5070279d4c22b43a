#include "packed_tile.h"

#include "gelu.h"

namespace ppma {

namespace {

// `tiles` tiles of M rows each, from row `first` on. Of the last vector of outputs `lanes` exist, all unless kEdge.
template <int M, int N, bool kEdge>
__attribute__((noinline)) void sum_tiles(const PanelProduct& product, int64_t first, int64_t tiles, int lanes) {
  auto read = [&](const float* from, int n) {
    return kEdge && n == N - 1 ? load_part(from + n * kLanes, lanes) : load(from + n * kLanes);
  };
  auto write = [&](float* to, int n, Vec x) {
    if (kEdge && n == N - 1)
      store_part(to + n * kLanes, x, lanes);
    else
      store(to + n * kLanes, x);
  };
  const int64_t x_stride = product.x_stride, out_stride = product.out_stride;
  const float *x = product.x + first * x_stride, *start = product.start;
  if (start) start += first * product.start_stride;
  float* out = product.out + first * out_stride;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Vec sums[M][N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      Vec bias = product.bias ? read(product.bias, n) : Vec{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) sums[m][n] = bias;
    }
    if (start) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sums[m][n] += read(start + m * product.start_stride, n);
      }
      start += M * product.start_stride;
    }
    const float* weights = product.weights;
    for (int64_t segment = 0; segment < product.segments; ++segment) {
      // Rows 0, 1, 2 and 3, 4, 5 are addressed from one pointer each: 1 and 2 are factors that an address can have.
      const float* left[(M + 2) / 3];
#pragma GCC unroll 4
      for (int third = 0; third < (M + 2) / 3; ++third)
        left[third] = x + segment * product.segment_stride + 3 * third * x_stride;
#pragma GCC unroll 4
      for (int64_t k = 0; k < product.depth; ++k, weights += kPanel) {
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
    if (product.gelu) {
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) write(out + m * out_stride, n, gelu(read(out + m * out_stride, n)).value);
    }
    x += M * x_stride;
    out += M * out_stride;
  }
}

// Calls `sum_tiles` for a height of 1 .. kTileRows.
template <int N, bool kEdge, int M = kTileRows>
void of_height(int64_t height, const PanelProduct& product, int64_t first, int64_t tiles, int lanes) {
  if constexpr (M > 0) {
    if (height == M)
      sum_tiles<M, N, kEdge>(product, first, tiles, lanes);
    else
      of_height<N, kEdge, M - 1>(height, product, first, tiles, lanes);
  }
}

// Tiles of nearly equal height: 14 rows are 5 + 5 + 4 and not 6 + 6 + 2, whose last tile would wait on itself.
template <int N, bool kEdge>
void run_rows(const PanelProduct& product, int64_t rows, int lanes) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  if (tiles == 0) return;
  int64_t low = rows / tiles, high = rows % tiles;
  if (high) of_height<N, kEdge>(low + 1, product, 0, high, lanes);
  of_height<N, kEdge>(low, product, high * (low + 1), tiles - high, lanes);
}

}  // namespace

void run_panel(const PanelProduct& product, int64_t rows, int64_t outputs) {
  int lanes = static_cast<int>(outputs > kLanes ? outputs - kLanes : outputs);
  if (outputs >= kPanel)
    run_rows<kPanelVectors, false>(product, rows, kLanes);
  else if (outputs > kLanes)
    run_rows<kPanelVectors, true>(product, rows, lanes);
  else
    run_rows<1, true>(product, rows, lanes);
}

}  // namespace ppma
