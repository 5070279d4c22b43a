// Gradients of the weight and bias of a 3x3 convolution of channel-last images.
//
// For output row y and kernel row r, the inputs of all pixels of the row are three taps of `inputs` numbers each, which lie
// side by side in an input row with a border of zeros: the gradient of a kernel row is a sum of products, one for each
// output row,
//
//   grad[o][r][tap, c] += sum over j of grad_out[y][j][o] * x[y * stride + r - 1][j * stride + tap - 1][c].
//
// A task takes a chunk of the output rows and a group of outputs and has its own sums. Chunks depend on the shape alone and
// are added up in order, so the bits do not depend on the number of threads.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "product.h"
#include "view.h"

using namespace ppma;

namespace {

// Mirrors `_PARAMS` of conv.py.
struct Params {
  View x;              // (batch, height, width, inputs), the last axis with stride 1
  View grad_out;       // (batch, out_height, out_width, outputs), the last axis with stride 1
  float* grad_weight;  // (outputs, inputs, 3, 3)
  float* grad_bias;    // (outputs)
  int64_t batch, height, width, inputs, outputs;
  int64_t stride;  // 1 or 2
  int64_t threads;
};

constexpr int64_t kGroup = 32;  // outputs of a task: a row of x is copied for this many
constexpr int64_t kTasks = 16;

struct Geometry {
  int64_t out_height, out_width;
  int64_t width;   // of a kernel row's sums
  int64_t groups;  // of outputs
  int64_t chunks;  // of rows
  int64_t rows;    // of all images

  explicit Geometry(const Params& params)
      : out_height((params.height + params.stride - 1) / params.stride),
        out_width((params.width + params.stride - 1) / params.stride),
        width(padded(3 * params.inputs)),
        groups((params.outputs + kGroup - 1) / kGroup),
        rows(params.batch * out_height) {
    chunks = std::clamp<int64_t>(kTasks / groups, 1, std::max<int64_t>(rows, 1));
  }
  int64_t sums_of_output() const { return 3 * width; }
};

// The sums of one chunk of rows.
struct Sums {
  float* weight;  // outputs x kernel rows x width
  float* bias;    // outputs

  Sums(float* memory, const Params& params, const Geometry& geometry, int64_t chunk)
      : weight(memory + chunk * size(params, geometry)), bias(weight + params.outputs * geometry.sums_of_output()) {}
  static int64_t size(const Params& params, const Geometry& geometry) {
    return params.outputs * (geometry.sums_of_output() + 1);
  }
};

// The last input rows that were copied with their border; kernel rows of neighbouring outputs share them.
class InputRows {
 public:
  InputRows(const Params& params, float* memory) : params_(params), memory_(memory) {}
  static int64_t floats_of_row(const Params& params) { return (params.width + 2) * params.inputs + 2 * kLanes; }

  // Null for a row outside the image.
  const float* row(int64_t image, int64_t y) {
    if (y < 0 || y >= params_.height) return nullptr;
    int64_t number = image * params_.height + y, slot = number % 3;
    float* to = memory_ + slot * floats_of_row(params_);
    if (held_[slot] != number) copy(params_.x.data + image * params_.x.stride[0] + y * params_.x.stride[1], to);
    held_[slot] = number;
    return to;
  }

 private:
  void copy(const float* from, float* to) const {
    const int64_t inputs = params_.inputs, width = params_.width, stride = params_.x.stride[2];
    std::memset(to, 0, sizeof(float) * inputs);
    float* inside = to + inputs;
    if (stride == inputs) {
      std::memcpy(inside, from, sizeof(float) * width * inputs);
    } else {
      for (int64_t j = 0; j < width; ++j) std::memcpy(inside + j * inputs, from + j * stride, sizeof(float) * inputs);
    }
    // The border on the right, and what whole vectors of the last pixel read behind it.
    std::memset(inside + width * inputs, 0, sizeof(float) * (inputs + 2 * kLanes));
  }

  const Params& params_;
  float* memory_;
  int64_t held_[3] = {-1, -1, -1};
};

// Adds what rows [begin, end) give to outputs [first, last).
void add_rows(const Params& params, const Geometry& geometry, int64_t begin, int64_t end, int64_t first, int64_t last,
              InputRows& inputs, const Sums& sums) {
  const int64_t of_output = geometry.sums_of_output(), *stride = params.grad_out.stride;
  for (int64_t row = begin; row < end; ++row) {
    int64_t image = row / geometry.out_height, y = row % geometry.out_height;
    const float* grad = params.grad_out.data + image * stride[0] + y * stride[1];
    for (int64_t r = 0; r < 3; ++r) {
      const float* x = inputs.row(image, y * params.stride + r - 1);
      if (!x) continue;
      product(columns_of(grad + first, stride[2]), {x, params.stride * params.inputs}, last - first, geometry.width,
              geometry.out_width, Store{sums.weight + first * of_output + r * geometry.width, of_output, true});
    }
    for (int64_t o = first; o < last; o += kLanes) {
      int count = static_cast<int>(std::min<int64_t>(kLanes, last - o));
      Vec total = load_part(sums.bias + o, count);
      for (int64_t j = 0; j < geometry.out_width; ++j) total += load_part(grad + j * stride[2] + o, count);
      store_part(sums.bias + o, total, count);
    }
  }
}

// Adds up the chunks for output o.
void finish(const Params& params, const Geometry& geometry, float* memory, int64_t o) {
  const int64_t size = Sums::size(params, geometry);
  auto total = [&](const float* first) {
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < geometry.chunks; ++chunk) sum += first[chunk * size];
    return sum;
  };
  Sums sums(memory, params, geometry, 0);
  const float* weight = sums.weight + o * geometry.sums_of_output();
  for (int64_t r = 0; r < 3; ++r)
    for (int64_t tap = 0; tap < 3; ++tap)
      for (int64_t c = 0; c < params.inputs; ++c)
        params.grad_weight[((o * params.inputs + c) * 3 + r) * 3 + tap] = total(weight + r * geometry.width + tap * params.inputs + c);
  params.grad_bias[o] = total(sums.bias + o);
}

}  // namespace

PPMA_EXPORT int ppma_conv_gradient(const Params* given) {
  const Params& params = *given;
  const Geometry geometry(params);
  const int64_t of_output = geometry.sums_of_output();
  const int threads = static_cast<int>(params.threads);
  float* memory = Scratch::floats<1>(geometry.chunks * Sums::size(params, geometry));
  if (!memory) return 1;
  std::atomic<bool> failed{false};
  parallel_for(geometry.chunks * geometry.groups, threads, [&](int64_t task) {
    int64_t group = task % geometry.groups, chunk = task / geometry.groups;
    int64_t first = params.outputs * group / geometry.groups, last = params.outputs * (group + 1) / geometry.groups;
    float* rows = Scratch::floats(3 * InputRows::floats_of_row(params));
    if (!rows) {
      failed = true;
      return;
    }
    InputRows inputs(params, rows);
    Sums sums(memory, params, geometry, chunk);
    std::fill(sums.weight + first * of_output, sums.weight + last * of_output, 0.0f);
    std::fill(sums.bias + first, sums.bias + last, 0.0f);
    add_rows(params, geometry, geometry.rows * chunk / geometry.chunks, geometry.rows * (chunk + 1) / geometry.chunks, first,
             last, inputs, sums);
  });
  if (!failed) parallel_for(params.outputs, threads, [&](int64_t o) { finish(params, geometry, memory, o); });
  Scratch::trim<1>();
  return failed;
}
