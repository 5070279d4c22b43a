// Gradients of the weight and bias of a linear layer: grad_weight[o][i] = sum over rows of grad[row][o] * x[row][i].
//
// A task takes a chunk of the rows, a group of outputs and a group of inputs. Block of rows by block, it copies its columns
// of `grad` into tiles, [tile][row][kTileRows], and those of x panel by panel, [row][kPanel]: a panel stays in the
// first-level cache while it meets all tiles. What the next block will copy is fetched meanwhile, a line of every row
// during each sum.
//
// Chunks depend on the shape alone and are added up in order, so the bits do not depend on the number of threads.
#include <algorithm>
#include <cstring>

#include "packed_tile.h"
#include "parallel.h"
#include "product.h"
#include "view.h"

using namespace ppma;

namespace {

// Mirrors `_PARAMS` of linear_gradient.py. An image is `tokens` rows.
struct Params {
  const float* x;       // (rows, inputs), contiguous
  const float* grad;    // (rows, outputs), rows grad_stride apart
  const int64_t* kept;  // the images that count, ascending
  int64_t images;       // how many they are, at least one
  int64_t tokens, inputs, outputs, grad_stride;
  float* grad_weight;  // (outputs, inputs)
  float* grad_bias;    // (outputs)
  float scale;         // multiplies both
  int32_t threads;
};

// Of a block: so many rows of a panel fit into the first-level cache, beside one tile's.
constexpr int64_t kBlockRows = std::min<int64_t>(256, 6144 / kPanel);
// Copied of a row for each tile, and what a tile's rows take with the surplus of the last one.
constexpr int64_t kCopied = 8, kTileFloats = kBlockRows * kTileRows + kCacheLine;
static_assert(kTileRows <= kCopied, "");
constexpr int64_t kCopiedRows = 16;
// Chunks have no fewer rows than this, and there are no more of them.
constexpr int64_t kChunkRows = 2048, kMostChunks = 8;
constexpr int64_t kTasksPerThread = 2;
// Of a group at the most: its sums stay in the second-level cache from block to block. Multiples of 128 outputs with a few
// logits of decays behind them have no more groups than without.
constexpr int64_t kGroupOutputs = 136, kGroupInputs = 512;

int64_t rounded_up(int64_t count, int64_t divisor) { return (count + divisor - 1) / divisor; }

struct Geometry {
  Tiles outputs;
  int64_t rows, chunks, panels;
  int64_t output_groups, input_groups;

  explicit Geometry(const Params& params)
      : outputs(params.outputs),
        rows(params.images * params.tokens),
        panels(panels_of(params.inputs)),
        input_groups(rounded_up(params.inputs, kGroupInputs)) {
    for (chunks = 1; 2 * chunks <= kMostChunks && 2 * chunks * kChunkRows <= rows;) chunks *= 2;
    output_groups = rounded_up(params.outputs, kGroupOutputs);
    // As many tasks for every thread.
    if (params.threads > 1) {
      const int64_t others = chunks * input_groups, threads = params.threads;
      const int64_t wanted = std::max(output_groups * others, kTasksPerThread * threads);
      output_groups = std::min(outputs.count, rounded_up(rounded_up(wanted, threads) * threads, others));
    }
  }
  int64_t tasks() const { return chunks * output_groups * input_groups; }
};

// A line in the first of some rows.
struct Lines {
  const float* first;
  int64_t stride;
};

// The rows of the next block, from which lines are fetched one after the other.
class NextRows {
 public:
  void add(const float* rows, int64_t stride, int64_t columns) {
    ranges_[count_++] = {{rows, stride}, rounded_up(columns, kCacheLine)};
  }

  // One that is in the cache already if there are no more.
  Lines take(const float* cached) {
    while (range_ < count_ && taken_ == ranges_[range_].lines) ++range_, taken_ = 0;
    if (range_ == count_) return {cached, 0};
    return {ranges_[range_].rows.first + taken_++ * kCacheLine, ranges_[range_].rows.stride};
  }

 private:
  struct Range {
    Lines rows;
    int64_t lines;
  } ranges_[2];
  int count_ = 0, range_ = 0;
  int64_t taken_ = 0;
};

// `scale` times the sums of M outputs and N vectors of inputs over a block, of the last vector `lanes`, stored or added.
template <int M, int N>
__attribute__((noinline)) void sum_block(const float* left, const float* right, int64_t rows, Lines fetched, float* to,
                                         int64_t stride, int lanes, bool add, float scale) {
  Vec sums[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      sums[m][n] = Vec{};
      if (add) __builtin_prefetch(to + m * stride + n * kLanes, 1);
    }
  }
#pragma GCC unroll 2
  for (int64_t row = 0; row < rows; ++row, left += kTileRows, right += kPanel, fetched.first += fetched.stride) {
    __builtin_prefetch(fetched.first, 0, 2);
    Vec of_right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) of_right[n] = load(right + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec of_left = splat(left[m]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += of_left * of_right[n];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* at = to + m * stride + n * kLanes;
      const int count = n == N - 1 ? lanes : kLanes;
      Vec sum = sums[m][n] * scale;
      store_lanes(at, add ? load_lanes(at, count) + sum : sum, count);
    }
  }
}

// Calls `sum_block` for 1 .. M outputs.
template <int N, int M = kTileRows, class... Arguments>
void of_height(int64_t height, Arguments... arguments) {
  if constexpr (M > 0) {
    if (height == M)
      sum_block<M, N>(arguments...);
    else
      of_height<N, M - 1>(height, arguments...);
  }
}

// Calls `of_height` for as many vectors as `columns` need.
template <int N = kPanelVectors>
void of_width(int64_t columns, int64_t height, const float* left, const float* right, int64_t rows, Lines fetched, float* to,
              int64_t stride, bool add, float scale) {
  if constexpr (N > 0) {
    const int64_t lanes = std::min<int64_t>(columns - (N - 1) * kLanes, kLanes);
    if (lanes > 0)
      of_height<N>(height, left, right, rows, fetched, to, stride, static_cast<int>(lanes), add, scale);
    else
      of_width<N - 1>(columns, height, left, right, rows, fetched, to, stride, add, scale);
  }
}

// What a task copies of a block, and the sums of its gradients over the block.
struct Copies {
  float *grad, *panel, *bias;

  Copies(Arena& arena, int64_t tiles)
      : grad(arena.take(tiles * kTileFloats)),
        panel(arena.take(kBlockRows * kPanel)),
        bias(arena.take(tiles * kTileRows)) {}
};

class Task {
 public:
  // The first chunk is summed in the result, the others in `partial`.
  Task(const Params& params, const Geometry& geometry, int64_t index, float* partial) : params_(params), tiled_(geometry.outputs) {
    const int64_t of_inputs = index % geometry.input_groups, rest = index / geometry.input_groups;
    const int64_t of_outputs = rest % geometry.output_groups, chunk = rest / geometry.output_groups;
    begin_ = geometry.rows * chunk / geometry.chunks, end_ = geometry.rows * (chunk + 1) / geometry.chunks;
    first_tile_ = tiled_.count * of_outputs / geometry.output_groups;
    tiles_ = tiled_.count * (of_outputs + 1) / geometry.output_groups - first_tile_;
    first_output_ = tiled_.first(first_tile_), outputs_ = tiled_.first(first_tile_ + tiles_) - first_output_;
    first_input_ = geometry.panels * of_inputs / geometry.input_groups * kPanel;
    last_input_ = std::min(params.inputs, geometry.panels * (of_inputs + 1) / geometry.input_groups * kPanel);
    weight_ = chunk ? partial + (chunk - 1) * size(params) : params.grad_weight;
    bias_ = chunk ? weight_ + params.outputs * params.inputs : params.grad_bias;
  }

  // Of a chunk's sums.
  static int64_t size(const Params& params) { return params.outputs * (params.inputs + 1); }

  // Returns false if there is no memory.
  bool run() const {
    float* memory = Scratch::floats(floats_of<Copies>(tiles_));
    if (!memory) return false;
    Arena arena(memory);
    const Copies copies(arena, tiles_);
    const int64_t all = end_ - begin_, blocks = rounded_up(all, kBlockRows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = begin_ + all * block / blocks, end = begin_ + all * (block + 1) / blocks;
      copy_grad(begin, end, copies);
      if (first_input_ == 0)
        for (int64_t o = 0; o < outputs_; ++o) {
          float& bias = bias_[first_output_ + o];
          bias = (block ? bias : 0.0f) + copies.bias[o] * params_.scale;
        }
      multiply(begin, end, copies, block > 0);
    }
    return true;
  }

 private:
  // Where a row of the images that count lies.
  int64_t place(int64_t row) const { return params_.kept[row / params_.tokens] * params_.tokens + row % params_.tokens; }

  // Calls body(place, row of the block, count) for rows [begin, end), by runs that follow one another in memory.
  template <class Body>
  void runs(int64_t begin, int64_t end, Body body) const {
    for (int64_t row = begin, count; row < end; row += count) {
      count = std::min(end - row, params_.tokens - row % params_.tokens);
      body(place(row), row - begin, count);
    }
  }

  void copy_grad(int64_t begin, int64_t end, const Copies& copies) const {
    std::fill_n(copies.bias, outputs_, 0.0f);
    runs(begin, end, [&](int64_t place, int64_t row, int64_t count) {
      // A few rows at a time: their lines are still in the first-level cache when the next tile needs the rest of them, and
      // what is written follows one another.
      for (int64_t done = 0; done < count; done += kCopiedRows) {
        const float* from = params_.grad + (place + done) * params_.grad_stride + first_output_;
        copy_rows(from, std::min(kCopiedRows, count - done), copies.grad + (row + done) * kTileRows);
        add_rows(from, std::min(kCopiedRows, count - done), copies.bias);
      }
    });
  }

  void copy_rows(const float* from, int64_t rows, float* to) const {
    int64_t o = 0, tile = first_tile_;
    // A fixed number, more than a tile has, takes few instructions; the next row overwrites the surplus.
    for (; o + kCopied <= outputs_; o += tiled_.rows(tile++), to += kTileFloats)
      for (int64_t row = 0; row < rows; ++row)
        std::memcpy(to + row * kTileRows, from + row * params_.grad_stride + o, sizeof(float) * kCopied);
    for (; o < outputs_; o += tiled_.rows(tile++), to += kTileFloats)
      for (int64_t row = 0; row < rows; ++row)
        std::copy_n(from + row * params_.grad_stride + o, tiled_.rows(tile), to + row * kTileRows);
  }

  void add_rows(const float* from, int64_t rows, float* sums) const {
    int64_t o = 0;
    for (; o + kLanes <= outputs_; o += kLanes) {
      Vec sum = load(sums + o);
      for (int64_t row = 0; row < rows; ++row) sum += load(from + row * params_.grad_stride + o);
      store(sums + o, sum);
    }
    for (; o < outputs_; ++o)
      for (int64_t row = 0; row < rows; ++row) sums[o] += from[row * params_.grad_stride + o];
  }

  void multiply(int64_t begin, int64_t end, const Copies& copies, bool add) const {
    const int64_t inputs = params_.inputs, rows = end - begin;
    NextRows next;
    if (end < end_) {
      next.add(params_.grad + place(end) * params_.grad_stride + first_output_, params_.grad_stride, outputs_);
      next.add(params_.x + place(end) * inputs + first_input_, inputs, last_input_ - first_input_);
    }
    for (int64_t input = first_input_; input < last_input_; input += kPanel) {
      const int64_t columns = std::min(kPanel, last_input_ - input);
      const float* panel = copies.panel;
      if (inputs == kPanel && place(end - 1) - place(begin) == rows - 1) {
        panel = params_.x + place(begin) * inputs;  // as a copy would be
      } else {
        runs(begin, end, [&](int64_t place, int64_t row, int64_t count) {
          pack_rows(params_.x + place * inputs + input, inputs, count, columns, copies.panel + row * kPanel, kPanel);
        });
      }
      for (int64_t tile = first_tile_; tile < first_tile_ + tiles_; ++tile)
        of_width(columns, tiled_.rows(tile), copies.grad + (tile - first_tile_) * kTileFloats, panel, rows, next.take(panel),
                 weight_ + tiled_.first(tile) * inputs + input, inputs, add, params_.scale);
    }
  }

  const Params& params_;
  const Tiles tiled_;  // all outputs
  int64_t begin_, end_;  // rows
  int64_t first_tile_, tiles_, first_output_, outputs_;
  int64_t first_input_, last_input_;
  float *weight_, *bias_;
};

}  // namespace

PPMA_EXPORT int ppma_linear_gradient(const Params* given) {
  const Params& params = *given;
  const Geometry geometry(params);
  const int64_t size = Task::size(params);
  float* partial = geometry.chunks > 1 ? Scratch::floats<1>((geometry.chunks - 1) * size) : nullptr;
  if (geometry.chunks > 1 && !partial) return 1;
  std::atomic<bool> failed{false};
  parallel_for(geometry.tasks(), params.threads, [&](int64_t index) {
    if (!Task(params, geometry, index, partial).run()) failed = true;
  });
  if (geometry.chunks > 1 && !failed) {
    parallel_for(params.outputs, params.threads, [&](int64_t o) {
      for (const float* sums = partial; sums < partial + (geometry.chunks - 1) * size; sums += size) {
        for (int64_t i = o * params.inputs; i < (o + 1) * params.inputs; ++i) params.grad_weight[i] += sums[i];
        params.grad_bias[o] += sums[params.outputs * params.inputs + o];
      }
    });
  }
  Scratch::trim();
  Scratch::trim<1>();
  return failed;
}
