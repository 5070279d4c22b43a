#include "packed_tile.h"

#include <algorithm>

#include "gelu.h"

namespace ppma {

namespace {

// `tiles` tiles of M rows each, from tile `from` and row `first` on. Of the last vector of outputs `lanes` exist.
template <int M, int N>
__attribute__((noinline)) void sum_tiles(const PanelProduct& product, int64_t from, int64_t first, int64_t tiles, int lanes) {
  auto read = [&](const float* from, int n) {
    return load_lanes(from + n * kLanes, n == N - 1 ? lanes : kLanes);
  };
  auto write = [&](float* to, int n, Vec x) {
    store_lanes(to + n * kLanes, x, n == N - 1 ? lanes : kLanes);
  };
  const int64_t x_stride = product.x_stride, out_stride = product.out_stride, tile_stride = product.tile_stride;
  const float *x = product.x + (tile_stride ? from * tile_stride : first * x_stride), *start = product.start;
  if (start) start += first * product.start_stride;
  float* out = product.out + first * out_stride;
  const float* next = product.next + from * product.segments * product.next_lines * kCacheLine;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    Vec sums[M][N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      Vec bias = product.bias ? read(product.bias, n) : Vec{};
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) sums[m][n] = bias;
    }
    if (start) {
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] += read(start + m * product.start_stride, n);
      }
      start += M * product.start_stride;
    }
    // The next tile's results and what they start from: pieces of rows that lie too far apart for the hardware to see them.
    if (tile + 1 < tiles) {
#pragma GCC unroll 16
      for (int m = M; m < 2 * M; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < N; n += 16 / kLanes) {
          __builtin_prefetch(out + m * out_stride + n * kLanes, 1);
          if (start) __builtin_prefetch(start + (m - M) * product.start_stride + n * kLanes);
        }
      }
    }
    const float* weights = product.weights;
    for (int64_t segment = 0; segment < product.segments; ++segment) {
      // Rows 0, 1, 2 and 3, 4, 5 are addressed from one pointer each: 1 and 2 are factors that an address can have.
      const float* left[(M + 2) / 3];
      const int64_t depth = segment + 1 < product.segments ? product.depth : product.last_depth;
      for (int64_t line = 0; line < product.next_lines; ++line, next += kCacheLine) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
      for (int third = 0; third < (M + 2) / 3; ++third)
        left[third] = x + segment * product.segment_stride + 3 * third * x_stride;
#pragma GCC unroll 4
      for (int64_t k = 0; k < depth; ++k, weights += kPanel) {
        Vec of_weights[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) of_weights[n] = load(weights + n * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          Vec of_x = splat(left[m / 3][m % 3 * x_stride + k]);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] += of_x * of_weights[n];
        }
      }
    }
    // All sums are stored first: constants of the activation would push them out of their registers.
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) write(out + m * out_stride, n, sums[m][n]);
    }
    if (product.gelu) {
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) write(out + m * out_stride, n, gelu(read(out + m * out_stride, n)).value);
    }
    x += tile_stride ? tile_stride : M * x_stride;
    out += M * out_stride;
  }
}

// Calls `sum_tiles` for a height of 1 .. kTileRows.
template <int N, int M = kTileRows>
void of_height(int64_t height, const PanelProduct& product, int64_t from, int64_t first, int64_t tiles, int lanes) {
  if constexpr (M > 0) {
    if (height == M)
      sum_tiles<M, N>(product, from, first, tiles, lanes);
    else
      of_height<N, M - 1>(height, product, from, first, tiles, lanes);
  }
}

template <int N>
void run_rows(const PanelProduct& product, int64_t rows, int lanes) {
  const Tiles tiles(rows);
  if (tiles.high) of_height<N>(tiles.low + 1, product, 0, 0, tiles.high, lanes);
  of_height<N>(tiles.low, product, tiles.high, tiles.high * (tiles.low + 1), tiles.count - tiles.high, lanes);
}

// Calls `run_rows` for as many vectors as `outputs` need.
template <int N = kPanelVectors>
void of_width(const PanelProduct& product, int64_t rows, int64_t outputs) {
  if constexpr (N > 0) {
    const int64_t lanes = outputs - (N - 1) * kLanes;
    if (lanes > 0)
      run_rows<N>(product, rows, static_cast<int>(std::min<int64_t>(lanes, kLanes)));
    else
      of_width<N - 1>(product, rows, outputs);
  }
}

}  // namespace

void run_panel(const PanelProduct& product, int64_t rows, int64_t outputs) { of_width(product, rows, outputs); }

}  // namespace ppma
