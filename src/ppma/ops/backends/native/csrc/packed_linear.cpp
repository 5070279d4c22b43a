// Packed products with what stands before and behind a linear layer of a block: layer norm, bias, residual, rotary embeddings.
//
// A part of a panel stays in the first-level cache while it meets a block of rows, and these rows,
// normalised, in the second. Every output is summed over its inputs in ascending order, so the bits depend neither on
// the number of threads nor on the other rows.
#include "packed_linear.h"

#include <algorithm>
#include <cmath>

#include "packed_tile.h"
#include "parallel.h"
#include "simd.h"

using namespace ppma;

namespace {

constexpr int64_t kBlockRows = 96;
constexpr int64_t kPartInputs = 384;  // of a panel at a time

// Rotates columns [column, column + count) of a row, whole vectors. A vector may hold several heads or a part of one: head_dim
// is a divisor or a multiple of kLanes.
void rotate(const PackedLinearParams& params, int64_t row, int64_t token, int64_t column, int64_t count) {
  const int64_t pairs = params.head_dim / 2;
  const float *cosine = params.cosine + token * pairs, *sine = params.sine + token * pairs;
  float* out = params.out + row * params.out_stride + column;
  const IntVec odd = (lane_index() & 1) != 0, swap = lane_index() ^ 1, pair_of = lane_index() / 2;
  int64_t at = column % params.head_dim / 2;
  for (int64_t c = 0; c < count; c += kLanes) {
    // One number for each pair of channels.
    auto table = [&](const float* from) {
      if (pairs >= kLanes / 2) return shuffle(load_part(from + at, kLanes / 2), pair_of);
      Vec repeated;
      for (int lane = 0; lane < kLanes; ++lane) repeated[lane] = from[at + lane / 2 % pairs];
      return repeated;
    };
    Vec x = load(out + c), sines = table(sine);
    store(out + c, x * table(cosine) + shuffle(x, swap) * select(odd, sines, -sines));
    at += kLanes / 2;
    if (at >= pairs) at = 0;
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
        for (int64_t t = 0; t < tiles; ++t) {
          int64_t row = rows * t / tiles, count = rows * (t + 1) / tiles - row, at = first + row;
          Tile tile{};
          tile.x = x + row * stride + begin;
          tile.x_stride = stride;
          tile.segments = 1;
          tile.depth = end - begin;
          tile.weights = params.packed + column * params.inputs + begin * kPanel;
          tile.bias = params.bias ? params.bias + column : nullptr;
          tile.residual = params.residual ? params.residual + at * params.residual_stride + column : nullptr;
          tile.residual_stride = params.residual_stride;
          tile.out = params.out + at * params.out_stride + column;
          tile.out_stride = params.out_stride;
          tile.resume = part > 0;
          run_tile(tile, count, params.outputs - column);
          if (end == params.inputs && column < params.rotated)
            for (int64_t r = at, token = at % params.tokens; r < at + count; ++r) {
              rotate(params, r, token, column, std::min(kPanel, params.rotated - column));
              if (++token == params.tokens) token = 0;
            }
        }
      }
    }
  });
  return failed;
}
