// Packed products with what stands before and behind a linear layer of a block: layer norm, bias, residual, rotary embeddings.
//
// The weights lie in panels of kPanel outputs, [panel][input][output of the panel]. A tile of kTileRows x kPanel sums
// stays in registers; a part of a panel stays in the first-level cache while it meets a block of rows, and these rows,
// normalised, in the second. Every output is summed over its inputs in ascending order, so the bits depend neither on
// the number of threads nor on the other rows.
#include "packed_linear.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "simd.h"

using namespace ppma;

namespace {

constexpr int kVectors = 2;
constexpr int64_t kPanel = kVectors * kLanes;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;  // 24 sums, two vectors of weights and one input in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums in 16 registers
#endif
constexpr int64_t kBlockRows = 96;
constexpr int64_t kPartInputs = 384;  // of a panel at a time

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// Rotates the vector of outputs that begins at this row and column. It may hold several heads or a part of one: head_dim
// is a divisor or a multiple of kLanes.
void rotate(const PackedLinearParams& params, int64_t row, int64_t column) {
  int64_t pairs = params.head_dim / 2, at = row % params.tokens * pairs + column % params.head_dim / 2;
  // One number for each pair of channels.
  auto table = [&](const float* from) {
    if (pairs >= kLanes / 2) return shuffle(load_part(from + at, kLanes / 2), lane_index() / 2);
    Vec repeated;
    for (int lane = 0; lane < kLanes; ++lane) repeated[lane] = from[at + lane / 2 % pairs];
    return repeated;
  };
  float* here = params.out + row * params.out_stride + column;
  Vec x = load(here), sine = table(params.sine);
  Vec swapped = shuffle(x, lane_index() ^ 1);
  store(here, x * table(params.cosine) + swapped * select(lane_index() % 2 == 0, -sine, sine));
}

// Sums of M rows and N vectors of outputs over inputs [begin, end). Of the last vector the first `lanes` outputs exist, all
// unless kEdge.
template <int M, int N, bool kEdge>
__attribute__((noinline)) void tile(const PackedLinearParams& params, const float* x, int64_t x_stride, int64_t row,
                                    int64_t column, int64_t begin, int64_t end) {
  int lanes = kEdge ? static_cast<int>(params.outputs - column - (N - 1) * kLanes) : kLanes;
  auto read = [&](const float* from, int n) {
    return kEdge && n == N - 1 ? load_part(from + n * kLanes, lanes) : load(from + n * kLanes);
  };
  float* out = params.out + row * params.out_stride + column;
  Vec sums[M][N];
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    Vec bias = params.bias ? read(params.bias + column, n) : Vec{};
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      if (begin > 0)
        sums[m][n] = read(out + m * params.out_stride, n);
      else if (params.residual)
        sums[m][n] = bias + read(params.residual + (row + m) * params.residual_stride + column, n);
      else
        sums[m][n] = bias;
    }
  }
  const float* weights = params.packed + column * params.inputs + begin * kPanel;
  const float* left = x + begin;
  for (int64_t k = begin; k < end; ++k, ++left, weights += kPanel) {
    Vec of_weights[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) of_weights[n] = load(weights + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec of_x = splat(left[m * x_stride]);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[m][n] += of_x * of_weights[n];
    }
  }
  // All sums are stored first: a call in between would spill them.
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      float* to = out + m * params.out_stride + n * kLanes;
      if (kEdge && n == N - 1)
        store_part(to, sums[m][n], lanes);
      else
        store(to, sums[m][n]);
    }
  }
  if (end == params.inputs && column < params.rotated) {
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N && column + n * kLanes < params.rotated; ++n) rotate(params, row + m, column + n * kLanes);
  }
}

// Calls `tile` for M of 1 .. kTileRows.
template <int N, bool kEdge, int M = kTileRows, class... Arguments>
void tile_of(int64_t rows, const Arguments&... arguments) {
  if constexpr (M > 0) {
    if (rows == M)
      tile<M, N, kEdge>(arguments...);
    else
      tile_of<N, kEdge, M - 1>(rows, arguments...);
  }
}

// (x - mean) / sqrt(variance + eps) of each row.
void normalise(const PackedLinearParams& params, int64_t row, int64_t count, float* to) {
  int64_t inputs = params.inputs, whole = inputs / kLanes * kLanes;
  int rest = static_cast<int>(inputs - whole);
  for (int64_t r = 0; r < count; ++r, to += inputs) {
    const float* from = params.x + (row + r) * params.x_stride;
    Vec total[2] = {};
    for (int64_t c = 0; c < whole; c += kLanes) total[c / kLanes % 2] += load(from + c);
    if (rest) total[0] += load_part(from + whole, rest);
    float mean = sum(total[0] + total[1]) / inputs;
    Vec squares[2] = {};
    for (int64_t c = 0; c < whole; c += kLanes) {
      Vec x = load(from + c) - mean;
      squares[c / kLanes % 2] += x * x;
    }
    if (rest) {
      Vec x = select(lane_index() < rest, load_part(from + whole, rest) - mean, Vec{});
      squares[0] += x * x;
    }
    float scale = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / inputs + params.norm_eps);
    for (int64_t c = 0; c < whole; c += kLanes) store(to + c, (load(from + c) - mean) * scale);
    for (int64_t c = whole; c < inputs; ++c) to[c] = (from[c] - mean) * scale;
  }
}

}  // namespace

// How many floats the packed weights of a layer take.
PPMA_EXPORT int64_t ppma_packed_linear_size(int64_t outputs, int64_t inputs) {
  return panels_of(outputs) * kPanel * inputs;
}

// weight is (outputs, inputs), contiguous.
PPMA_EXPORT int ppma_pack_linear(const float* weight, int64_t outputs, int64_t inputs, float* packed) {
  for (int64_t panel = 0; panel < panels_of(outputs); ++panel)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = 0; n < kPanel; ++n) {
        int64_t output = panel * kPanel + n;
        *packed++ = output < outputs ? weight[output * inputs + k] : 0.0f;
      }
  return 0;
}

PPMA_EXPORT int ppma_packed_linear(const PackedLinearParams* given) {
  const PackedLinearParams& params = *given;
  int64_t blocks = (params.rows + kBlockRows - 1) / kBlockRows, panels = panels_of(params.outputs);
  int64_t parts = std::max<int64_t>(1, (params.inputs + kPartInputs - 1) / kPartInputs);
  // With few rows the panels are divided too; each group normalises the rows for itself.
  int64_t groups = std::clamp<int64_t>(4 * params.threads / std::max<int64_t>(blocks, 1), 1, panels);
  if (params.threads == 1) groups = 1;
  bool norm = params.norm_eps >= 0;
  std::atomic<bool> failed{false};
  parallel_for(blocks * groups, params.threads, [&](int64_t task) {
    int64_t block = task / groups, group = task % groups;
    int64_t first = params.rows * block / blocks, rows = params.rows * (block + 1) / blocks - first;
    const float* x = params.x + first * params.x_stride;
    int64_t stride = params.x_stride;
    if (norm) {
      float* normed = Scratch::floats(rows * params.inputs);
      if (!normed) {
        failed = true;
        return;
      }
      normalise(params, first, rows, normed);
      x = normed, stride = params.inputs;
    }
    int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = params.inputs * part / parts, end = params.inputs * (part + 1) / parts;
      for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; ++panel) {
        int64_t column = panel * kPanel;
        int64_t outputs = params.outputs - column;
        for (int64_t t = 0; t < tiles; ++t) {
          int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row;
          const float* left = x + row * stride;
          if (outputs >= kPanel)
            tile_of<kVectors, false>(count, params, left, stride, first + row, column, begin, end);
          else if (outputs > kLanes)
            tile_of<kVectors, true>(count, params, left, stride, first + row, column, begin, end);
          else
            tile_of<1, true>(count, params, left, stride, first + row, column, begin, end);
        }
      }
    }
  });
  return failed;
}
