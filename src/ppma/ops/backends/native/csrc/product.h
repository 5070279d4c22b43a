// Small matrix products: C[m][n] = sum over k of A[m][k] * B[k][n], with n in the lanes.
//
// A is read one number at a time, in any layout; rows of B are packed to whole vectors. The sums of a block
// of kBlockRows x kBlockVectors stay in registers, each over k in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace ppma {

// Two vectors of B and one number of A beside the sums: 15 of 16 registers.
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = 2;

inline int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The left factor: element (m, k) is data[m * row + k * column].
struct Left {
  const float* data;
  int64_t row;
  int64_t column;
};

inline Left rows_of(const float* data, int64_t stride) { return {data, stride, 1}; }
inline Left columns_of(const float* data, int64_t stride) { return {data, 1, stride}; }

// The right factor: padded rows, `stride` floats apart.
struct Right {
  const float* data;
  int64_t stride;
};

// Not inlined: constants of `finish` that a loop around it keeps in registers would push sums out of them.
template <int M, int N, class Finish>
__attribute__((noinline)) void block_product(const Left& a, const Right& b, int64_t depth, const Finish& finish,
                                             int64_t row, int64_t column) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec{};
  const float* left = a.data + row * a.row;
  const float* right = b.data + column;
  for (int64_t k = 0; k < depth; ++k) {
    Vec of_right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) of_right[n] = load(right + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      Vec of_left = splat(left[m * a.row]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] += of_left * of_right[n];
    }
    left += a.column;
    right += b.stride;
  }
  const Finish local = finish;  // a copy that its stores cannot change
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) local(row + m, column + n * kLanes, sums[m][n]);
}

// Calls `block_product` for a height of 1 .. M.
template <int M, int N, class Finish>
inline void of_height(int64_t height, const Left& a, const Right& b, int64_t depth, const Finish& finish, int64_t row,
                      int64_t column) {
  if constexpr (M > 0) {
    if (height == M)
      block_product<M, N>(a, b, depth, finish, row, column);
    else
      of_height<M - 1, N>(height, a, b, depth, finish, row, column);
  }
}

template <int N, class Finish>
inline void row_blocks(const Left& a, const Right& b, int64_t rows, int64_t depth, const Finish& finish, int64_t column) {
  constexpr int kRows = N <= kBlockVectors ? kBlockRows : kBlockRows * kBlockVectors / N;
  // Blocks of nearly equal height: 14 rows are 5 + 5 + 4 and not 6 + 6 + 2, whose last block would wait on itself.
  int64_t blocks = (rows + kRows - 1) / kRows, low = rows / std::max<int64_t>(blocks, 1);
  int64_t high_blocks = rows - low * blocks;
  for (int64_t row = 0, height; row < rows; row += height) {
    height = low + (high_blocks-- > 0);
    of_height<kRows, N>(height, a, b, depth, finish, row, column);
  }
}

// Calls finish(row, column, sums) for every vector of the product.
template <class Finish>
void product(const Left& a, const Right& b, int64_t rows, int64_t columns, int64_t depth,
             const Finish& finish) {
  const int64_t vectors = (columns + kLanes - 1) / kLanes;
  int64_t column = 0;
  // An odd number ends with three vectors instead of a single one, which would take as many loads as sums.
  for (; column + (vectors % 2 ? 3 : 0) * kLanes < vectors * kLanes; column += kBlockVectors * kLanes)
    row_blocks<kBlockVectors>(a, b, rows, depth, finish, column);
  if (vectors == 1)
    row_blocks<1>(a, b, rows, depth, finish, 0);
  else if (vectors % 2)
    row_blocks<3>(a, b, rows, depth, finish, column);
}

// Stores or adds whole vectors: rows of the result are padded.
struct Store {
  float* to;
  int64_t stride;
  bool add = false;

  void operator()(int64_t row, int64_t column, Vec x) const {
    float* at = to + row * stride + column;
    store(at, add ? load(at) + x : x);
  }
};

// Stores whole vectors, times `scale`.
struct ScoreStore {
  float* to;
  int64_t stride;
  float scale;

  void operator()(int64_t row, int64_t column, Vec x) const { store(to + row * stride + column, x * scale); }
};

// Scales each row and stores or adds the first `columns` numbers of it, leaving the memory behind them alone.
struct ScaledStore {
  float* to;
  int64_t stride;
  int64_t columns;
  const float* row_scale;  // null for 1
  float scale;
  bool add;

  void operator()(int64_t row, int64_t column, Vec x) const {
    float* at = to + row * stride + column;
    int count = column + kLanes <= columns ? kLanes : static_cast<int>(columns - column);
    x *= row_scale ? scale * row_scale[row] : scale;
    if (count == kLanes) {
      store(at, add ? load(at) + x : x);
    } else {
      store_part(at, add ? load_part(at, count) + x : x, count);
    }
  }
};

// Scales each row, adds another matrix if there is one, and stores the first `columns` numbers.
struct MixedStore {
  float* to;
  int64_t stride, columns;
  const float* plus;
  int64_t plus_stride;
  const float* row_scale;
  float scale;

  void operator()(int64_t row, int64_t column, Vec x) const {
    x *= scale * row_scale[row];
    if (plus) x += load(plus + row * plus_stride + column);
    float* at = to + row * stride + column;
    if (column + kLanes <= columns)
      store(at, x);
    else
      store_part(at, x, static_cast<int>(columns - column));
  }
};

// Compiled once, in product.cpp: every kernel uses them.
extern template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const Store&);
extern template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScoreStore&);
extern template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScaledStore&);
extern template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const MixedStore&);

// Copies `rows` rows of `columns` numbers, `stride` apart, to padded rows `width` apart; what pads them is 0.
inline void pack_rows(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) {
    int64_t column = 0;
    for (; column + kLanes <= columns; column += kLanes)
      store(to + row * width + column, load(from + row * stride + column));
    if (column < columns)
      store(to + row * width + column, load_part(from + row * stride + column, static_cast<int>(columns - column)));
  }
}

inline void pack_rows(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  pack_rows(from, stride, rows, columns, to, padded(columns));
}

// Copies the transpose, times `scale`, to `columns` padded rows of `rows` numbers, `to_stride` apart.
void pack_columns(const float* from, int64_t stride, int64_t rows, int64_t columns, float scale, float* to,
                  int64_t to_stride);

}  // namespace ppma
