// Channel-last depthwise convolution fused with the operations around it: out = base + conv(act(x)) + bias, where act
// is GELU or nothing and base is another tensor or act(x) itself.
//
// A task is a block of channels of a band of rows of one image. It walks down the band with the last K rows of act(x)
// in a ring buffer with zeros around them, so that every input is read, and its GELU computed, once (twice where bands
// meet). Bands depend on the shape alone, so the sums of the weight gradient do too.
#include <algorithm>
#include <cstring>

#include "gelu.h"
#include "parallel.h"
#include "view.h"

using namespace ppma;

namespace {

constexpr int64_t kBlock = 32;  // channels of a task
constexpr int kVecs = kBlock / kLanes;
constexpr int64_t kOutputs = 4;  // neighbouring outputs computed together, which share their inputs
constexpr int64_t kEnoughTasks = 16;

struct Shape {
  int64_t batch, height, width, channels;

  int64_t blocks() const { return (channels + kBlock - 1) / kBlock; }
  int64_t band_rows() const {
    int64_t tasks = batch * blocks();
    if (tasks >= kEnoughTasks) return height;
    return std::max<int64_t>(4, (height * tasks + kEnoughTasks - 1) / kEnoughTasks);
  }
  int64_t bands() const { return (height + band_rows() - 1) / band_rows(); }
  int64_t tasks() const { return batch * blocks() * bands(); }
};

struct Task {
  int64_t image, channel, begin, end;  // rows [begin, end)
  int count;                           // channels

  Task(const Shape& shape, int64_t index) {
    int64_t band = index % shape.bands(), rest = index / shape.bands();
    channel = rest % shape.blocks() * kBlock;
    image = rest / shape.blocks();
    begin = band * shape.band_rows();
    end = std::min(shape.height, begin + shape.band_rows());
    count = static_cast<int>(std::min(kBlock, shape.channels - channel));
  }

  // Lanes of vector `vec` that exist.
  int lanes(int vec) const { return std::clamp(count - vec * kLanes, 0, kLanes); }
  Vec load_lanes(const float* from, int vec) const {
    return lanes(vec) == kLanes ? load(from + vec * kLanes) : load_part(from + vec * kLanes, lanes(vec));
  }
  void store_lanes(float* to, Vec x, int vec) const {
    if (lanes(vec) == kLanes)
      store(to + vec * kLanes, x);
    else
      store_part(to + vec * kLanes, x, lanes(vec));
  }
};

// K rows of a block of channels with K / 2 zero columns on the left and at least as many on the right.
template <int K>
struct Ring {
  float* data;
  int64_t row_floats;

  static int64_t row_size(int64_t width) {
    return ((width + kOutputs - 1) / kOutputs * kOutputs + K - 1) * kBlock;
  }
  static int64_t size(int64_t width) { return K * row_size(width); }

  Ring(float* memory, int64_t width) : data(memory), row_floats(row_size(width)) {
    std::memset(data, 0, sizeof(float) * size(width));
  }
  // Row `y` of the image, from its first padding column; y >= -K / 2.
  float* row(int64_t y) const { return data + (y + K) % K * row_floats; }
  float* inside(int64_t y) const { return row(y) + K / 2 * kBlock; }
};

// conv[o] for the outputs at columns j .. j + kOutputs - 1 of row y.
template <int K>
inline void convolve(const Ring<K>& ring, int64_t y, int64_t j, int vec, const Vec (&taps)[K * K],
                     Vec (&sums)[kOutputs]) {
#pragma GCC unroll 8
  for (int ky = 0; ky < K; ++ky) {
    const float* row = ring.row(y + ky - K / 2) + j * kBlock + vec * kLanes;
#pragma GCC unroll 16
    for (int kx = 0; kx < K + kOutputs - 1; ++kx) {
      Vec x = load(row + kx * kBlock);
#pragma GCC unroll 4
      for (int o = 0; o < kOutputs; ++o) {
        if (kx - o >= 0 && kx - o < K) sums[o] += x * taps[ky * K + kx - o];
      }
    }
  }
}

// The taps of a task's channels, [ky][kx][channel], flipped for the gradient; `centre` is added to the middle one.
template <int K>
void pack_taps(const float* weight, const Task& task, bool flipped, float centre, float* taps) {
  std::memset(taps, 0, sizeof(float) * K * K * kBlock);
  for (int tap = 0; tap < K * K; ++tap) {
    int from = flipped ? K * K - 1 - tap : tap;
    for (int c = 0; c < task.count; ++c) taps[tap * kBlock + c] = weight[(task.channel + c) * K * K + from];
  }
  for (int c = 0; c < task.count; ++c) taps[K * K / 2 * kBlock + c] += centre;
}

// One vector of the packed taps, to be kept in registers.
template <int K>
inline void load_taps(const float* packed, int vec, Vec (&taps)[K * K]) {
  for (int tap = 0; tap < K * K; ++tap) taps[tap] = load(packed + tap * kBlock + vec * kLanes);
}

// Fills row y of a ring with make(vector of x), or with zeros outside the image.
template <int K, class Make>
void fill(const Ring<K>& ring, const View& x, const Shape& shape, const Task& task, int64_t y, Make make) {
  if (y < 0 || y >= shape.height) {
    std::memset(ring.row(y), 0, sizeof(float) * ring.row_floats);
    return;
  }
  float* to = ring.inside(y);
  const float* from = x.at(task.image, y, 0, 0) + task.channel;
  for (int64_t j = 0; j < shape.width; ++j) {
    for (int vec = 0; vec < kVecs; ++vec) {
      Vec value = task.load_lanes(from + j * x.stride[2], vec);
      store(to + j * kBlock + vec * kLanes, make(value, y, j, vec));
    }
  }
}

template <int K, bool kGelu>
int forward(const View& x, const float* weight, const float* bias, const View* base, const View& out,
            const Shape& shape, int threads) {
  std::atomic<bool> failed{false};
  parallel_for(shape.tasks(), threads, [&](int64_t index) {
    Task task(shape, index);
    float* memory = Scratch::floats(K * K * kBlock + Ring<K>::size(shape.width));
    if (!memory) {
      failed = true;
      return;
    }
    pack_taps<K>(weight, task, false, base ? 0.0f : 1.0f, memory);
    Ring<K> ring(memory + K * K * kBlock, shape.width);
    auto activate = [](Vec value, int64_t, int64_t, int) { return kGelu ? gelu(value).value : value; };
    for (int64_t y = task.begin - K / 2; y < task.begin + K / 2; ++y) fill(ring, x, shape, task, y, activate);
    for (int64_t y = task.begin; y < task.end; ++y) {
      fill(ring, x, shape, task, y + K / 2, activate);
      for (int vec = 0; vec < kVecs && task.lanes(vec) > 0; ++vec) {
        Vec offset = bias ? task.load_lanes(bias + task.channel, vec) : Vec{};
        Vec taps[K * K];
        load_taps<K>(memory, vec, taps);
        for (int64_t j = 0; j < shape.width; j += kOutputs) {
          Vec sums[kOutputs];
          for (auto& sum : sums) sum = offset;
          convolve<K>(ring, y, j, vec, taps, sums);
          for (int64_t o = 0; o < std::min(kOutputs, shape.width - j); ++o) {
            if (base) sums[o] += task.load_lanes(base->at(task.image, y, j + o, 0) + task.channel, vec);
            task.store_lanes(out.at(task.image, y, j + o, 0) + task.channel, sums[o], vec);
          }
        }
      }
    }
  });
  return failed;
}

// Adds the products of one row of grad with the rows of act(x) around it to the sums of the taps, and grad itself to
// the sum of the bias.
template <int K>
void add_tap_gradients(const Ring<K>& grads, const Ring<K>& values, int64_t y, int64_t width, double* sums) {
  for (int vec = 0; vec < kVecs; ++vec) {
    const float* grad = grads.inside(y) + vec * kLanes;
    auto add = [&](int tap, Vec part) {
      for (int lane = 0; lane < kLanes; ++lane) sums[tap * kBlock + vec * kLanes + lane] += part[lane];
    };
    for (int ky = 0; ky < K; ++ky) {
      const float* row = values.row(y + ky - K / 2) + vec * kLanes;
      Vec parts[K] = {};
      for (int64_t j = 0; j < width; ++j) {
        Vec g = load(grad + j * kBlock);
#pragma GCC unroll 8
        for (int kx = 0; kx < K; ++kx) parts[kx] += g * load(row + (j + kx) * kBlock);
      }
      for (int kx = 0; kx < K; ++kx) add(ky * K + kx, parts[kx]);
    }
    Vec total{};
    for (int64_t j = 0; j < width; ++j) total += load(grad + j * kBlock);
    add(K * K, total);
  }
}

template <int K, bool kGelu>
int backward(const View& grad, const View& x, const float* weight, bool own_base, const View& grad_x,
             float* grad_weight, float* grad_bias, const Shape& shape, int threads) {
  constexpr int64_t kSums = (K * K + 1) * kBlock;
  // One more than needed: of nothing calloc may return null.
  auto* partial = static_cast<double*>(std::calloc(shape.tasks() * kSums + 1, sizeof(double)));
  if (!partial) return 1;
  std::atomic<bool> failed{false};
  parallel_for(shape.tasks(), threads, [&](int64_t index) {
    Task task(shape, index);
    int64_t ring_size = Ring<K>::size(shape.width);
    float* memory = Scratch::floats(K * K * kBlock + (kGelu ? 3 : 2) * ring_size);
    if (!memory) {
      failed = true;
      return;
    }
    pack_taps<K>(weight, task, true, own_base ? 1.0f : 0.0f, memory);
    float* rings = memory + K * K * kBlock;
    Ring<K> values(rings, shape.width), grads(rings + ring_size, shape.width);
    Ring<K> slopes(kGelu ? rings + 2 * ring_size : rings, shape.width);
    auto fill_row = [&](int64_t y) {
      fill(grads, grad, shape, task, y, [](Vec value, int64_t, int64_t, int) { return value; });
      fill(values, x, shape, task, y, [&](Vec value, int64_t, int64_t j, int vec) {
        if (!kGelu) return value;
        Gelu both = gelu(value);
        store(slopes.inside(y) + j * kBlock + vec * kLanes, both.slope);
        return both.value;
      });
    };
    double* sums = partial + index * kSums;
    for (int64_t y = task.begin - K / 2; y < task.begin + K / 2; ++y) fill_row(y);
    for (int64_t y = task.begin; y < task.end; ++y) {
      fill_row(y + K / 2);
      add_tap_gradients<K>(grads, values, y, shape.width, sums);
      for (int vec = 0; vec < kVecs && task.lanes(vec) > 0; ++vec) {
        Vec taps[K * K];
        load_taps<K>(memory, vec, taps);
        for (int64_t j = 0; j < shape.width; j += kOutputs) {
          Vec out[kOutputs] = {};
          convolve<K>(grads, y, j, vec, taps, out);
          for (int64_t o = 0; o < std::min(kOutputs, shape.width - j); ++o) {
            if (kGelu) out[o] *= load(slopes.inside(y) + (j + o) * kBlock + vec * kLanes);
            task.store_lanes(grad_x.at(task.image, y, j + o, 0) + task.channel, out[o], vec);
          }
        }
      }
    }
  });
  // The parts of a block of channels, images and bands in order.
  parallel_for(shape.blocks(), threads, [&](int64_t block) {
    for (int64_t tap = 0; tap <= K * K; ++tap) {
      for (int64_t c = 0; c < std::min(kBlock, shape.channels - block * kBlock); ++c) {
        double total = 0;
        for (int64_t image = 0; image < shape.batch; ++image)
          for (int64_t band = 0; band < shape.bands(); ++band)
            total += partial[((image * shape.blocks() + block) * shape.bands() + band) * kSums + tap * kBlock + c];
        int64_t channel = block * kBlock + c;
        (tap == K * K ? grad_bias[channel] : grad_weight[channel * K * K + tap]) = static_cast<float>(total);
      }
    }
  });
  std::free(partial);
  return failed;
}

// Calls action with the kernel size and the activation as constants.
template <class Action>
int dispatch(int64_t kernel, bool with_gelu, Action action) {
  auto sized = [&](auto size) {
    return with_gelu ? action(size, std::true_type{}) : action(size, std::false_type{});
  };
  if (kernel == 3) return sized(std::integral_constant<int, 3>{});
  return sized(std::integral_constant<int, 5>{});
}

Shape shape_of(const int64_t* sizes) { return {sizes[0], sizes[1], sizes[2], sizes[3]}; }

}  // namespace

// x, base (may be null) and out are (batch, height, width, channels); weight is (channels, kernel, kernel), contiguous;
// bias may be null; kernel is 3 or 5. With no base, act(x) is the base.
PPMA_EXPORT int ppma_depthwise_conv(const View* x, const float* weight, const float* bias, const View* base, const View* out,
                               const int64_t* sizes, int64_t kernel, int with_gelu, int threads) {
  return dispatch(kernel, with_gelu, [&](auto size, auto activation) {
    return forward<size.value, activation.value>(*x, weight, bias, base, *out, shape_of(sizes), threads);
  });
}

// Gradients of x, weight and bias; that of a base is grad itself.
PPMA_EXPORT int ppma_depthwise_conv_backward(const View* grad, const View* x, const float* weight, int own_base,
                                        const View* grad_x, float* grad_weight, float* grad_bias, const int64_t* sizes,
                                        int64_t kernel, int with_gelu, int threads) {
  return dispatch(kernel, with_gelu, [&](auto size, auto activation) {
    return backward<size.value, activation.value>(*grad, *x, weight, own_base, *grad_x, grad_weight, grad_bias,
                                                  shape_of(sizes), threads);
  });
}
