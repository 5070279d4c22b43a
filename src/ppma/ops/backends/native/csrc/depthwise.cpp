// Channel-last depthwise convolution with what stands around it in a block: out = base + conv(act(x)) + bias, where act
// is GELU or nothing and base is another tensor or act(x) itself.
//
// A task is a block of channels of a band of rows of one image, or of several small images. It walks down the band with
// the last K rows of act(x) in a ring buffer with zeros around them, so that every input is read, and its GELU computed,
// once (twice where bands meet). In the backward pass blocks, bands and groups of images depend on the shape alone, so the
// sums of the weight gradient do too; an output has the same bits whatever they are.
#include "depthwise.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "gelu.h"
#include "parallel.h"
#include "product.h"

using namespace ppma;

namespace {

// Neighbouring outputs computed together. Their sums, a row of taps and one input fit in 16 registers.
constexpr int kOutputs = 7;
constexpr int64_t kEnoughTasks = 16;
constexpr int64_t kManyTasks = 64;  // beyond this, small images share a task and its gradients' sums
constexpr int64_t kGroupRows = 64;  // of a group of images
constexpr int64_t kAhead = 8;       // pixels that are prefetched: a block's part of a pixel is too short for the hardware
constexpr int64_t kRingFloats = 48 << 10;  // of all rings of a task, which stay in the second-level cache
constexpr int64_t kNarrowBlock = 64;
constexpr int64_t kNarrowestBlock = 32;  // where it takes the place of bands, which read the rows at their ends twice
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kLeastRows = 4;   // of a band
constexpr int64_t kFlushRows = 8;   // after so many rows the float sums of the tap gradients go into double ones

struct Shape {
  int64_t batch, height, width, channels;
  int64_t block;  // channels of a task, a multiple of kLanes
  int64_t band;   // rows of a task
  int64_t group;  // images of a task

  // With at least `enough` tasks if there is so much to divide. Fewer images than threads are divided into bands: the rows
  // that a thread also has in the products before and behind.
  Shape(const int64_t* sizes, int kernel, int rings, int64_t enough, int threads = 1)
      : batch(sizes[0]), height(sizes[1]), width(sizes[2]), channels(sizes[3]) {
    // Whole pixels where there is work enough to divide: long runs of memory.
    int64_t whole = (channels + kLanes - 1) / kLanes * kLanes;
    int64_t fitting = kRingFloats / (rings * kernel * (width + kernel - 1)) / kNarrowBlock * kNarrowBlock;
    block = std::min(whole, std::max(kNarrowBlock, batch >= kEnoughTasks / 4 && width >= 28 ? fitting : 0));
    const int64_t parts = batch < threads ? threads / std::gcd(batch, static_cast<int64_t>(threads)) : 1;
    auto rows_of = [&](int64_t bands) { return std::max(kLeastRows, (height + bands - 1) / bands); };
    band = rows_of(parts);
    group = 1;
    if (tasks() < enough) block = std::min(block, kNarrowestBlock);
    const int64_t images = std::max<int64_t>(batch * blocks(), 1);
    if (tasks() < enough) band = rows_of((enough + images - 1) / images);
    if (bands() == 1) group = std::max<int64_t>(1, std::min(images / kManyTasks, kGroupRows / height));
  }
  int64_t blocks() const { return (channels + block - 1) / block; }
  int64_t bands() const { return (height + band - 1) / band; }
  int64_t groups() const { return (batch + group - 1) / group; }
  int64_t tasks() const { return groups() * blocks() * bands(); }
};

struct Task {
  int64_t image, last_image;           // the present one of its images, and the one after the last
  int64_t channel, begin, end;         // rows [begin, end)
  int64_t count;                       // channels

  Task(const Shape& shape, int64_t index) {
    int64_t rest = index / shape.blocks();
    channel = index % shape.blocks() * shape.block;
    image = rest / shape.bands() * shape.group;
    last_image = std::min(shape.batch, image + shape.group);
    begin = rest % shape.bands() * shape.band;
    end = std::min(shape.height, begin + shape.band);
    count = std::min(shape.block, shape.channels - channel);
  }
  // Lanes that exist of the vector at channel c of the block.
  int lanes(int64_t c) const { return static_cast<int>(std::min<int64_t>(kLanes, count - c)); }
  float* pixel(const View& x, int64_t y, int64_t j) const { return x.at(image, y, j, 0) + channel; }
};

// K rows of a block of channels with K / 2 zero columns on either side.
template <int K>
struct Ring {
  float* data;
  int64_t block, row_floats;

  static int64_t size(const Shape& shape) { return K * (shape.width + K - 1) * shape.block; }

  Ring(float* memory, const Shape& shape)
      : data(memory), block(shape.block), row_floats((shape.width + K - 1) * shape.block) {
    std::memset(data, 0, sizeof(float) * size(shape));
  }
  // Row `y` of the image, from its first padding column; y >= -K / 2.
  float* row(int64_t y) const { return data + (y + K) % K * row_floats; }
  float* inside(int64_t y) const { return row(y) + K / 2 * block; }
};

// The taps of all channels, [ky][kx][channel], and behind them an offset for each channel. Packed once for all tasks of a
// call, or for all calls.
template <int K>
struct Taps {
  int64_t stride;  // from tap to tap
  const float *taps, *offsets;

  Taps(const float* packed, int64_t channels)
      : stride(stride_of(channels)), taps(packed), offsets(packed + K * K * stride) {}

  static int64_t stride_of(int64_t channels) { return (channels + kCacheLine - 1) / kCacheLine * kCacheLine; }
  static int64_t size(int64_t channels) { return (K * K + 1) * stride_of(channels); }

  // Rotated by 180 degrees for the gradient; `centre` is added to the middle one. No bias is 0.
  static Taps pack(const float* weight, const float* bias, int64_t channels, bool rotated, float centre, float* to) {
    const int64_t stride = stride_of(channels);
    pack_columns(weight, K * K, channels, K * K, 1.0f, to, stride);
    if (rotated)
      for (int tap = 0; tap < K * K / 2; ++tap)
        std::swap_ranges(to + tap * stride, to + (tap + 1) * stride, to + (K * K - 1 - tap) * stride);
    for (int64_t c = 0; c < channels; ++c) to[K * K / 2 * stride + c] += centre;
    for (int64_t c = 0; c < stride; ++c) to[K * K * stride + c] = bias && c < channels ? bias[c] : 0.0f;
    return Taps(to, channels);
  }
};

// Adds to sums[o] the convolution at kOutputs or fewer neighbouring columns. rows[ky] is the upper left input of row ky, whose
// pixels lie `block` apart.
template <int K, int kCount>
inline void convolve(const float* const (&rows)[K], int64_t block, const float* taps, int64_t tap_stride,
                     Vec (&sums)[kCount]) {
#pragma GCC unroll 1
  for (int ky = 0; ky < K; ++ky) {
    const float* row = rows[ky];
    Vec tap[K];
#pragma GCC unroll 8
    for (int kx = 0; kx < K; ++kx) tap[kx] = load(taps + (ky * K + kx) * tap_stride);
#pragma GCC unroll 16
    for (int column = 0; column < kCount + K - 1; ++column) {
      Vec x = load(row + column * block);
#pragma GCC unroll 8
      for (int o = 0; o < kCount; ++o) {
        if (column - o >= 0 && column - o < K) sums[o] += x * tap[column - o];
      }
    }
  }
}

// Calls action with each count of 1 .. kOutputs as a constant.
template <int kCount = kOutputs, class Action>
inline void with_count(int64_t count, Action action) {
  if constexpr (kCount > 0) {
    if (count == kCount)
      action(std::integral_constant<int, kCount>{});
    else
      with_count<kCount - 1>(count, action);
  }
}

// What becomes of a row of sums: to = (offsets + base + sum) * slope, each of the three or none of them. Decided when it
// runs, so that every direction and activation shares the convolutions below: they are most of what there is to compile.
struct Epilogue {
  float* to;
  int64_t to_stride;
  const float* offsets = nullptr;  // of the channels
  const float* base = nullptr;
  int64_t base_stride = 0;
  const float* slope = nullptr;  // as in a ring

  template <int kCount>
  void start(int64_t j, int64_t c, int lanes, Vec (&sums)[kCount]) const {
    Vec offset = offsets ? load(offsets + c) : Vec{};
#pragma GCC unroll 8
    for (int o = 0; o < kCount; ++o) sums[o] = offset;
    if (!base) return;
    const float* from = held(base + j * base_stride + c);
    if (lanes == kLanes) {
#pragma GCC unroll 8
      for (int o = 0; o < kCount; ++o, from += base_stride) sums[o] += load(from);
    } else {
      for (int o = 0; o < kCount; ++o, from += base_stride) sums[o] += load_part(from, lanes);
    }
  }

  template <int kCount>
  void finish(int64_t j, int64_t c, int lanes, int64_t block, Vec (&sums)[kCount]) const {
    if (slope) {
      const float* by = held(slope + j * block + c);
#pragma GCC unroll 8
      for (int o = 0; o < kCount; ++o, by += block) sums[o] *= load(by);
    }
    float* at = held(to + j * to_stride + c);
    if (lanes == kLanes) {
#pragma GCC unroll 8
      for (int o = 0; o < kCount; ++o, at += to_stride) store(at, sums[o]);
    } else {
      for (int o = 0; o < kCount; ++o, at += to_stride) store_part(at, sums[o], lanes);
    }
  }

 private:
  // One pointer for all the vectors of a tile: the compiler would keep one for each, more than there are registers, and add
  // to all of them after every tile.
  template <class Pointer>
  static Pointer held(Pointer pointer) {
    asm("" : "+r"(pointer));
    return pointer;
  }
};

// Convolves row y of a ring.
template <int K>
[[gnu::noinline]] void convolve_row(const Ring<K>& ring, const Taps<K>& taps, const Shape& shape, const Task& task,
                                    int64_t y, Epilogue epilogue) {
  const float* first[K];
  for (int ky = 0; ky < K; ++ky) first[ky] = ring.row(y + ky - K / 2);
  const float* of_task = taps.taps + task.channel;
  int64_t tiles = (shape.width + kOutputs - 1) / kOutputs;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t j = shape.width * tile / tiles;
    with_count(shape.width * (tile + 1) / tiles - j, [&](auto outputs) {
      for (int64_t c = 0; c < task.count; c += kLanes) {
        const float* rows[K];
        for (int ky = 0; ky < K; ++ky) rows[ky] = first[ky] + j * ring.block + c;
        Vec sums[outputs.value];
        epilogue.start(j, c, task.lanes(c), sums);
        convolve<K>(rows, ring.block, of_task + c, taps.stride, sums);
        epilogue.finish(j, c, task.lanes(c), ring.block, sums);
      }
    });
  }
}

// Fills row y of a ring with make(vector of x, offset in the row), or with zeros outside the image.
template <int K, class Make>
void fill(const Ring<K>& ring, const View& x, const Shape& shape, const Task& task, int64_t y, Make make) {
  if (y < 0 || y >= shape.height) {
    std::memset(ring.row(y), 0, sizeof(float) * ring.row_floats);
    return;
  }
  float* to = ring.inside(y);
  const float* from = task.pixel(x, y, 0);
  int64_t whole = task.count / kLanes * kLanes;
  for (int64_t j = 0; j < shape.width; ++j, from += x.stride[2]) {
    int64_t at = j * ring.block;
    for (int64_t c = 0; c < whole; c += kLanes) {
      if (c % 16 == 0) __builtin_prefetch(from + kAhead * x.stride[2] + c);
      store(to + at + c, make(load(from + c), at + c));
    }
    if (whole < task.count) store(to + at + whole, make(load_part(from + whole, task.lanes(whole)), at + whole));
  }
}

template <int K, bool kGelu>
int forward(const View& x, const Taps<K>& taps, const View* base, const View& out, const int64_t* sizes, int threads) {
  const Shape shape(sizes, K, 1, threads == 1 ? 1 : kTasksPerThread * threads, threads);
  std::atomic<bool> failed{false};
  parallel_for(shape.tasks(), threads, [&](int64_t index) {
    Task task(shape, index);
    float* memory = Scratch::floats(Ring<K>::size(shape));
    if (!memory) {
      failed = true;
      return;
    }
    Ring<K> ring(memory, shape);
    auto activate = [](Vec value, int64_t) { return kGelu ? gelu(value).value : value; };
    for (; task.image < task.last_image; ++task.image) {
      for (int64_t y = task.begin - K / 2; y < task.begin + K / 2; ++y) fill(ring, x, shape, task, y, activate);
      for (int64_t y = task.begin; y < task.end; ++y) {
        fill(ring, x, shape, task, y + K / 2, activate);
        Epilogue epilogue{task.pixel(out, y, 0), out.stride[2], taps.offsets + task.channel};
        if (base) epilogue.base = task.pixel(*base, y, 0), epilogue.base_stride = base->stride[2];
        convolve_row(ring, taps, shape, task, y, epilogue);
      }
    }
  });
  return failed;
}

// Adds the products of a row of grad with kRows rows of values, as far as they lie under the kernel's taps, to the float
// sums of these taps, which stay in registers along the row beside kTile gradients.
template <int K, int kRows, int kTile>
inline void add_tap_row(const float* grad, const float* const* rows, int64_t block, int64_t width, float* sums) {
  Vec parts[kRows][K];
#pragma GCC unroll 8
  for (int ky = 0; ky < kRows; ++ky)
#pragma GCC unroll 8
    for (int kx = 0; kx < K; ++kx) parts[ky][kx] = load(sums + (ky * K + kx) * block);
  auto add = [&](int64_t j, auto tile) {
    Vec grads[tile.value];
#pragma GCC unroll 8
    for (int o = 0; o < tile.value; ++o) grads[o] = load(grad + (j + o) * block);
#pragma GCC unroll 16
    for (int column = 0; column < tile.value + K - 1; ++column)
#pragma GCC unroll 8
      for (int ky = 0; ky < kRows; ++ky) {
        Vec x = load(rows[ky] + (j + column) * block);
#pragma GCC unroll 8
        for (int o = 0; o < tile.value; ++o) {
          if (column - o >= 0 && column - o < K) parts[ky][column - o] += x * grads[o];
        }
      }
  };
  int64_t j = 0;
  for (; j + kTile <= width; j += kTile) add(j, std::integral_constant<int, kTile>{});
  with_count<kTile - 1>(width - j, [&](auto rest) { add(j, rest); });
#pragma GCC unroll 8
  for (int ky = 0; ky < kRows; ++ky)
#pragma GCC unroll 8
    for (int kx = 0; kx < K; ++kx) store(sums + (ky * K + kx) * block, parts[ky][kx]);
}

// Row y of the tap gradients, [ky][kx][channel], and the gradient of the bias behind them.
template <int K>
[[gnu::noinline]] void add_tap_gradients(const Ring<K>& grads, const Ring<K>& values, const Shape& shape,
                                         const Task& task, int64_t y, float* sums) {
  int64_t block = shape.block;
  for (int64_t c = 0; c < task.count; c += kLanes) {
    const float* grad = grads.inside(y) + c;
    const float* rows[K];
    for (int ky = 0; ky < K; ++ky) rows[ky] = values.row(y + ky - K / 2) + c;
    // The tiles fill 16 registers; 25 taps do not fit and go in three parts.
    if constexpr (K == 3) {
      add_tap_row<3, 3, 5>(grad, rows, block, shape.width, sums + c);
    } else {
      add_tap_row<5, 2, 4>(grad, rows, block, shape.width, sums + c);
      add_tap_row<5, 2, 4>(grad, rows + 2, block, shape.width, sums + 2 * K * block + c);
      add_tap_row<5, 1, 7>(grad, rows + 4, block, shape.width, sums + 4 * K * block + c);
    }
    Vec total = load(sums + K * K * block + c);
    for (int64_t j = 0; j < shape.width; ++j) total += load(grad + j * block);
    store(sums + K * K * block + c, total);
  }
}

// With GELU and no base, `out` may also take the output again: its inputs are at hand.
template <int K, bool kGelu>
int backward(const View& grad, const View& x, const float* weight, const float* bias, bool own_base, const View& grad_x,
             float* grad_weight, float* grad_bias, const View* out, const int64_t* sizes, int threads) {
  constexpr int kRings = kGelu ? 3 : 2;
  constexpr bool kHasOutput = kGelu && K == 3;
  Shape shape(sizes, K, kRings, kEnoughTasks);
  int64_t count = (K * K + 1) * shape.block;
  // One more than needed: of nothing calloc may return null.
  auto* partial = static_cast<double*>(std::calloc(shape.tasks() * count + 1, sizeof(double)));
  if (!partial) return 1;
  const bool with_output = kHasOutput && out;
  const int64_t of_taps = Taps<K>::size(shape.channels);
  float* common = Scratch::floats<1>((with_output ? 2 : 1) * of_taps);
  if (!common) {
    std::free(partial);
    return 1;
  }
  const Taps<K> taps = Taps<K>::pack(weight, nullptr, shape.channels, true, own_base ? 1.0f : 0.0f, common);
  const Taps<K> output_taps =
      with_output ? Taps<K>::pack(weight, bias, shape.channels, false, 1.0f, common + of_taps) : taps;
  std::atomic<bool> failed{false};
  parallel_for(shape.tasks(), threads, [&](int64_t index) {
    Task task(shape, index);
    int64_t ring_size = Ring<K>::size(shape);
    float* sums = Scratch::floats(count + kRings * ring_size);
    if (!sums) {
      failed = true;
      return;
    }
    float* rings = sums + count;
    std::memset(sums, 0, sizeof(float) * count);
    Ring<K> values(rings, shape), grads(rings + ring_size, shape);
    Ring<K> slopes(kGelu ? rings + 2 * ring_size : rings, shape);
    auto fill_row = [&](int64_t y) {
      fill(grads, grad, shape, task, y, [](Vec value, int64_t) { return value; });
      fill(values, x, shape, task, y, [&](Vec value, int64_t at) {
        if (!kGelu) return value;
        Gelu both = gelu(value);
        store(slopes.inside(y) + at, both.slope);
        return both.value;
      });
    };
    int64_t rows = 0;
    for (; task.image < task.last_image; ++task.image) {
      for (int64_t y = task.begin - K / 2; y < task.begin + K / 2; ++y) fill_row(y);
      for (int64_t y = task.begin; y < task.end; ++y) {
        fill_row(y + K / 2);
        add_tap_gradients(grads, values, shape, task, y, sums);
        bool last = task.image + 1 == task.last_image && y + 1 == task.end;
        if (++rows % kFlushRows == 0 || last) {
          for (int64_t k = 0; k < count; ++k) partial[index * count + k] += sums[k];
          std::memset(sums, 0, sizeof(float) * count);
        }
        if (with_output)
          convolve_row(values, output_taps, shape, task, y,
                       {task.pixel(*out, y, 0), out->stride[2], output_taps.offsets + task.channel});
        Epilogue epilogue{task.pixel(grad_x, y, 0), grad_x.stride[2]};
        if (kGelu) epilogue.slope = slopes.inside(y);
        convolve_row(grads, taps, shape, task, y, epilogue);
      }
    }
  });
  // The parts of a block of channels, groups of images and bands in order.
  parallel_for(shape.blocks(), threads, [&](int64_t block) {
    for (int64_t tap = 0; tap <= K * K; ++tap) {
      for (int64_t c = 0; c < std::min(shape.block, shape.channels - block * shape.block); ++c) {
        double total = 0;
        for (int64_t group = 0; group < shape.groups(); ++group)
          for (int64_t band = 0; band < shape.bands(); ++band)
            total += partial[((group * shape.bands() + band) * shape.blocks() + block) * count + tap * shape.block + c];
        int64_t channel = block * shape.block + c;
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

}  // namespace

int ppma::packed_depthwise(const View& x, const float* taps, const View* base, const View& out, const int64_t* sizes,
                           int64_t kernel, bool with_gelu, int threads) {
  return dispatch(kernel, with_gelu, [&](auto size, auto activation) {
    return forward<size.value, activation.value>(x, Taps<size.value>(taps, sizes[3]), base, out, sizes, threads);
  });
}

// x, base (may be null) and out are (batch, height, width, channels); weight is (channels, kernel, kernel), contiguous;
// bias may be null; kernel is 3 or 5. With no base, act(x) is the base.
PPMA_EXPORT int ppma_depthwise_conv(const View* x, const float* weight, const float* bias, const View* base, const View* out,
                               const int64_t* sizes, int64_t kernel, int with_gelu, int threads) {
  return dispatch(kernel, with_gelu, [&](auto size, auto activation) {
    using TapsOf = Taps<size.value>;
    float* memory = Scratch::floats<1>(TapsOf::size(sizes[3]));
    if (!memory) return 1;
    const TapsOf taps = TapsOf::pack(weight, bias, sizes[3], false, base ? 0.0f : 1.0f, memory);
    return forward<size.value, activation.value>(*x, taps, base, *out, sizes, threads);
  });
}

// Gradients of x, weight and bias; that of a base is grad itself. `out`, null or for a 3x3 kernel with GELU and no base, takes
// the output, with `bias`.
PPMA_EXPORT int ppma_depthwise_conv_backward(const View* grad, const View* x, const float* weight, const float* bias,
                                             int own_base, const View* grad_x, float* grad_weight, float* grad_bias,
                                             const View* out, const int64_t* sizes, int64_t kernel, int with_gelu,
                                             int threads) {
  return dispatch(kernel, with_gelu, [&](auto size, auto activation) {
    return backward<size.value, activation.value>(*grad, *x, weight, bias, own_base, *grad_x, grad_weight, grad_bias, out,
                                                  sizes, threads);
  });
}
