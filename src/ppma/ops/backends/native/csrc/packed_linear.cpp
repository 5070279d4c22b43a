// Packed products with what stands before and behind a linear layer of a block: layer norm, bias, residual, rotary
// embeddings, log-decays.
//
// A part of a panel stays in the first-level cache while it meets a block of rows, and these rows,
// normalised, in the second. Every output is summed over its inputs in ascending order, so the bits depend neither on
// the number of threads nor on the other rows.
#include "packed_linear.h"

#include <algorithm>
#include <cmath>

#include "decay_activation.h"
#include "packed_tile.h"
#include "parallel.h"
#include "product.h"
#include "rotary.h"
#include "simd.h"

using namespace ppma;

namespace {

constexpr int64_t kBlockTiles = 16;
constexpr int64_t kPartRuns = 25;  // of a panel at a time: 768 inputs, also with the logits of decays, are two parts

// The sum of `first` and of value(c) for the vectors at c in [0, whole).
template <class Value>
inline float sum_row(Vec first, int64_t whole, Value value) {
  Vec second{}, third{}, fourth{};
  int64_t c = 0;
  for (; c + 4 * kLanes <= whole; c += 4 * kLanes) {
    first += value(c);
    second += value(c + kLanes);
    third += value(c + 2 * kLanes);
    fourth += value(c + 3 * kLanes);
  }
  for (; c < whole; c += kLanes) first += value(c);
  return sum((first + second) + (third + fourth));
}

// (x - mean) / sqrt(variance + eps) of rows [row, row + rows), in tiles.
void normalise(const PackedLinearParams& params, int64_t row, int64_t rows, float* to) {
  const Tiles tiles(rows);
  const int64_t inputs = params.inputs, whole = inputs / kLanes * kLanes;
  const int rest = static_cast<int>(inputs - whole);
  const float* from = params.x + row * params.x_stride;
  for (int64_t tile = 0; tile < tiles.count; ++tile, to += tile_floats(inputs)) {
    for (int64_t m = 0; m < tiles.rows(tile); ++m, from += params.x_stride) {
      Vec tail = rest ? load_part(from + whole, rest) : Vec{};
      float mean = sum_row(tail, whole, [&](int64_t c) { return load(from + c); }) / inputs;
      tail = select(lane_index() < rest, tail - mean, Vec{});
      float squares = sum_row(tail * tail, whole, [&](int64_t c) {
        Vec x = load(from + c) - mean;
        return x * x;
      });
      float scale = 1.0f / std::sqrt(squares / inputs + params.norm_eps);
      float* of_row = to + m * kRunInputs;
      for (int64_t c = 0; c < whole; c += kLanes) store(of_row + run_offset(c), (load(from + c) - mean) * scale);
      if (rest) store_part(of_row + run_offset(whole), tail * scale, rest);
    }
  }
}

// What a block of rows needs; null where it needs nothing.
struct RowScratch {
  float* normed;      // in tiles
  float* logits;      // of the decays, rows x count
  float* transposed;  // count x rows

  RowScratch(Arena& arena, const PackedLinearParams& params, int64_t rows, int64_t count)
      : normed(params.norm_eps >= 0 ? arena.take(Tiles(rows).count * tile_floats(params.inputs)) : nullptr),
        logits(arena.take(rows * padded(count))),
        transposed(arena.take(count * padded(rows))) {}
};

// Log-decays of rows [row, row + rows).
void activate(const PackedLinearParams& params, const DecayColumns& decays, const RowScratch& scratch, int64_t row,
              int64_t rows) {
  const int64_t tokens = params.tokens, stride = padded(rows);
  pack_columns(scratch.logits, padded(decays.count), rows, decays.count, 1.0f, scratch.transposed, stride);
  for (int64_t done = 0, run; done < rows; done += run) {
    const int64_t image = (row + done) / tokens, token = (row + done) % tokens;
    run = std::min(rows - done, tokens - token);
    for (int64_t c = 0; c < decays.count; ++c) {
      const float *from = scratch.transposed + c * stride + done, rate = decays.rate ? decays.rate[c] : 1.0f;
      float* to = decays.out + (image * decays.count + c) * tokens + token;
      for (int64_t t = 0; t < run; t += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, run - t));
        Vec logits = load_lanes(from + t, lanes) + decays.bias[c];
        store_lanes(to + t, -rate * decay_activation(logits, decays.softplus).value, lanes);
        if (decays.logits) store_lanes(decays.logits + (to - decays.out) + t, logits, lanes);
      }
    }
  }
}

// The left factor of a block of rows, which begin at `row` or, normalised, at `normed`: inputs [begin, end), of which
// begin is the first of a run.
PanelProduct read_rows(const PackedLinearParams& params, int64_t row, const float* normed, int64_t begin, int64_t end) {
  PanelProduct product{};
  product.segments = (end - begin + kRunInputs - 1) / kRunInputs;
  product.depth = kRunInputs;
  product.last_depth = end - begin - (product.segments - 1) * kRunInputs;
  if (normed) {
    product.x = normed + run_offset(begin);
    product.x_stride = kRunInputs;
    product.tile_stride = tile_floats(params.inputs);
    product.segment_stride = kTileRows * kRunInputs;
  } else {
    product.x = params.x + row * params.x_stride + begin;
    product.x_stride = params.x_stride;
    product.segment_stride = kRunInputs;
  }
  return product;
}

}  // namespace

// How many floats the packed weights of a layer take.
PPMA_EXPORT int64_t ppma_packed_linear_size(int64_t outputs, int64_t inputs) {
  return panels_of(outputs) * kPanel * inputs;
}

// Packs `scale` times the weight, which is (outputs, inputs) or, if `transposed`, (inputs, outputs), contiguous.
PPMA_EXPORT int ppma_pack_linear(const float* weight, int64_t outputs, int64_t inputs, int transposed, float scale,
                                 float* packed, int threads) {
  parallel_for(panels_of(outputs), threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, outputs - first);
    float* to = packed + first * inputs;
    if (count < kPanel) std::fill_n(to, kPanel * inputs, 0.0f);
    if (transposed)
      for (int64_t input = 0; input < inputs; ++input)
        for (int64_t o = 0; o < count; o += kLanes) {
          const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - o));
          store(to + input * kPanel + o, load_lanes(weight + input * outputs + first + o, lanes) * scale);
        }
    else
      pack_columns(weight + first * inputs, inputs, count, inputs, scale, to, kPanel);
  });
  return 0;
}

int ppma::packed_linear(const PackedLinearParams& params, const DecayColumns* decays) {
  // Blocks are whole tiles, as many for each thread where there is more than one for each.
  int64_t tiles = (params.rows + kTileRows - 1) / kTileRows, blocks = (tiles + kBlockTiles - 1) / kBlockTiles;
  if (blocks > params.threads) blocks = (blocks + params.threads - 1) / params.threads * params.threads;
  int64_t panels = panels_of(params.outputs);
  int64_t runs = (params.inputs + kRunInputs - 1) / kRunInputs;
  int64_t parts = std::max<int64_t>(1, (runs + kPartRuns - 1) / kPartRuns);
  // With few rows the panels are divided too; each group normalises the rows for itself.
  int64_t groups = std::clamp<int64_t>(4 * params.threads / std::max<int64_t>(blocks, 1), 1, panels);
  if (params.threads == 1) groups = 1;
  int64_t count = decays ? decays->count : 0;
  const Rotation rotation{params.cosine, params.sine, params.rotated, params.head_dim, params.tokens};
  std::atomic<bool> failed{false};
  parallel_for(blocks * groups, params.threads, [&](int64_t task) {
    int64_t block = task / groups, group = task % groups;
    int64_t first = tiles * block / blocks * kTileRows;
    int64_t rows = std::min(params.rows, tiles * (block + 1) / blocks * kTileRows) - first;
    int64_t floats = floats_of<RowScratch>(params, rows, count);
    float* memory = floats ? Scratch::floats(floats) : nullptr;
    if (floats && !memory) {
      failed = true;
      return;
    }
    Arena arena(memory);
    RowScratch scratch(arena, params, rows, count);
    // Rows that are normalised are copied anyway, and then into tiles; for others a copy costs as much as it saves.
    if (scratch.normed) normalise(params, first, rows, scratch.normed);
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = runs * part / parts * kRunInputs, end = std::min(params.inputs, runs * (part + 1) / parts * kRunInputs);
      const PanelProduct left = read_rows(params, first, scratch.normed, begin, end);
      for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; ++panel) {
        int64_t column = panel * kPanel;
        PanelProduct product = left;
        product.weights = params.packed + column * params.inputs + begin * kPanel;
        product.out = params.out + first * params.out_stride + column;
        product.out_stride = params.out_stride;
        fetch_next(product, rows, product.weights + kPanel * params.inputs, end - begin);
        if (part > 0) {
          product.start = product.out;
          product.start_stride = params.out_stride;
        } else {
          product.bias = params.bias ? params.bias + column : nullptr;
          product.start = params.residual ? params.residual + first * params.residual_stride + column : nullptr;
          product.start_stride = params.residual_stride;
        }
        run_panel(product, rows, params.outputs - column);
        if (end == params.inputs && column < params.rotated)
          rotate<kPanelVectors>(rotation, params.out + first * params.out_stride, params.out_stride, first, rows, column);
      }
      if (group + 1 < groups) continue;
      for (int64_t column = 0; column < count; column += kPanel) {
        PanelProduct product = left;
        product.weights = decays->packed + column * params.inputs + begin * kPanel;
        product.out = scratch.logits + column;
        product.start = part > 0 ? product.out : nullptr;
        product.out_stride = product.start_stride = padded(count);
        run_panel(product, rows, count - column);
      }
    }
    if (count && group + 1 == groups) activate(params, *decays, scratch, first, rows);
  });
  return failed;
}

PPMA_EXPORT int ppma_packed_linear(const PackedLinearParams* params, const DecayColumns* decays) {
  return packed_linear(*params, decays);
}
