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
#include "slice_sums.h"

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

// The logits of rows [row, row + rows), which are in tiles at `normed` if they are normalised, to `to`, (images, heads *
// kOutputs, tokens). What lies between two heads' slices in a vector has the weight 0.
template <int kOutputs, bool kWhole>
void decay_logits(const PackedLinearParams& params, const DecayColumns& decays, const float* normed, int64_t row,
                  int64_t rows, float* to) {
  const Tiles tiles(rows);
  const int64_t inputs = params.inputs, tokens = params.tokens, d = inputs / decays.heads;
  const int64_t output_stride = decays.output_stride;
  auto lanes = [=](int64_t c) { return kWhole ? kLanes : static_cast<int>(std::min<int64_t>(kLanes, inputs - c)); };
  int64_t tile = 0, of_tile = 0;
  for (int64_t done = 0, count; done < rows; done += count) {
    const int64_t image = (row + done) / tokens, token = (row + done) % tokens;
    count = std::min({rows - done, tokens - token, static_cast<int64_t>(kLanes)});
    const float *last = nullptr, *of_token[kLanes];  // behind the last token the last one again
    for (int64_t t = 0; t < kLanes; ++t) {
      if (t < count && normed) {
        last = normed + tile * tile_floats(inputs) + of_tile * kRunInputs;
        if (++of_tile == tiles.rows(tile)) ++tile, of_tile = 0;
      } else if (t < count) {
        last = params.x + (row + done + t) * params.x_stride;
      }
      of_token[t] = last;
    }
    float* at = to + image * decays.heads * kOutputs * tokens + token;
    const float *weight = decays.weight, *bias = decays.bias;
    for (int64_t c = 0; c < inputs; c += d, weight += decays.head_stride, bias += kOutputs) {
      Vec logits[kOutputs];
      slice_sums<kOutputs>(
          c & -kLanes, c + d, [=](int64_t c) { return normed ? run_offset(c) : c; },
          [&](int t, int64_t c, int64_t place) { return load_lanes(of_token[t] + place, lanes(c)); },
          [=](int o, int64_t c) { return load_lanes(weight + o * output_stride + c, lanes(c)); }, logits);
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; ++o, at += tokens) store_lanes(at, logits[o] + bias[o], static_cast<int>(count));
    }
  }
}

// Log-decays of rows [row, row + rows) from their logits, which may lie in the same place.
void activate(const PackedLinearParams& params, const DecayColumns& decays, const float* logits, int64_t row, int64_t rows) {
  const int64_t tokens = params.tokens, columns = decays.heads * decays.outputs;
  for (int64_t done = 0, run; done < rows; done += run) {
    const int64_t image = (row + done) / tokens, token = (row + done) % tokens;
    run = std::min(rows - done, tokens - token);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t at = (image * columns + c) * tokens + token;
      const float rate = decays.rate ? decays.rate[c] : 1.0f;
      for (int64_t t = 0; t < run; t += kLanes) {
        const int lanes = static_cast<int>(std::min<int64_t>(kLanes, run - t));
        Vec value = decay_activation(load_lanes(logits + at + t, lanes), decays.softplus).value;
        store_lanes(decays.out + at + t, -rate * value, lanes);
      }
    }
  }
}

void log_decays(const PackedLinearParams& params, const DecayColumns& decays, const float* normed, int64_t row, int64_t rows) {
  const bool whole = params.inputs % kLanes == 0;
  auto run = decays.outputs == 1 ? (whole ? decay_logits<1, true> : decay_logits<1, false>)
                                 : (whole ? decay_logits<2, true> : decay_logits<2, false>);
  float* logits = decays.logits ? decays.logits : decays.out;
  run(params, decays, normed, row, rows, logits);
  activate(params, decays, logits, row, rows);
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

// Packs `scale` times the weight, which is (outputs, inputs) or, if `transposed`, (inputs, outputs), contiguous, as the first
// inputs of a layer that has `all` of them.
PPMA_EXPORT int ppma_pack_linear(const float* weight, int64_t outputs, int64_t inputs, int transposed, float scale,
                                 float* packed, int64_t all, int threads) {
  parallel_for(panels_of(outputs), threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, outputs - first);
    float* to = packed + first * all;
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

// Packs the transposed matrix of a map (outputs, d) of each head's slice of a token, as heads * outputs inputs from `begin` on
// of a layer that has `all` of them and heads * d outputs.
PPMA_EXPORT int ppma_pack_slices(const float* weight, int64_t heads, int64_t outputs, int64_t d, float* packed,
                                 int64_t begin, int64_t all) {
  for (int64_t panel = 0; panel < panels_of(heads * d); ++panel)
    std::fill_n(packed + (panel * all + begin) * kPanel, heads * outputs * kPanel, 0.0f);
  for (int64_t c = 0; c < heads * d; ++c) {
    float* to = packed + (c / kPanel * all + begin + c / d * outputs) * kPanel + c % kPanel;
    for (int64_t o = 0; o < outputs; ++o) to[o * kPanel] = weight[o * d + c % d];
  }
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
  const Rotation rotation{params.cosine, params.sine, params.rotated, params.head_dim, params.tokens};
  std::atomic<bool> failed{false};
  parallel_for(blocks * groups, params.threads, [&](int64_t task) {
    int64_t block = task / groups, group = task % groups;
    int64_t first = tiles * block / blocks * kTileRows;
    int64_t rows = std::min(params.rows, tiles * (block + 1) / blocks * kTileRows) - first;
    float* normed = nullptr;
    if (params.norm_eps >= 0) {
      // Rows that are normalised are copied anyway, and then into tiles; for others a copy costs as much as it saves.
      normed = Scratch::floats(Tiles(rows).count * tile_floats(params.inputs));
      if (!normed) {
        failed = true;
        return;
      }
      normalise(params, first, rows, normed);
    }
    for (int64_t part = 0; part < parts; ++part) {
      int64_t begin = runs * part / parts * kRunInputs, end = std::min(params.inputs, runs * (part + 1) / parts * kRunInputs);
      const PanelProduct left = read_rows(params, first, normed, begin, end);
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
    }
    if (decays && group + 1 == groups) log_decays(params, *decays, normed, first, rows);
  });
  return failed;
}

PPMA_EXPORT int ppma_packed_linear(const PackedLinearParams* params, const DecayColumns* decays) {
  return packed_linear(*params, decays);
}
