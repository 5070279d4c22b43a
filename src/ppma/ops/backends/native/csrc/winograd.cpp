// 3x3 convolutions by Winograd's algorithm: the 2 x 2 outputs of a tile come from its inputs d by
//
//   A^T [ (G g G^T) * (B^T d B) ] A
//
// with 16 products for every pair of channels instead of 36, or 25 with stride 2. Sums over the channels turn each place of
// B^T d B into a packed product. B and A hold only 0, 1 and -1; G g G^T is packed in advance (fused_conv.py).
//
// A block is a run of tiles, across rows and images, so that small images share one reading of the weights. Its transformed
// inputs meet one panel of outputs after the other, and only the sums of that panel are kept. Every output is summed in the
// same order whatever the block, so the bits do not depend on the number of threads.
#include <algorithm>

#include "gelu.h"
#include "packed_conv.h"
#include "packed_tile.h"
#include "parallel.h"

using namespace ppma;

namespace {

constexpr int64_t kBlockTiles = 48;  // at most: their transformed inputs share the second-level cache with the weights
constexpr int64_t kLeastTiles = 12;  // of a block that is smaller for the sake of more threads
constexpr int64_t kPrefetchedTiles = 4;
constexpr int64_t kTasksPerThread = 2;

// Along an axis a tile has two outputs. The places from this one on belong to the second alone; at the odd end of an image,
// where there is none, they are left out of the products.
constexpr int kSecond = 3;
constexpr int kMatrices = 4;  // rows of G

// F(2, 3): 4 products instead of 6.
struct Stride1 {
  static constexpr int kInputs = 4, kPlaces = 4;

  // The row of G that a place is multiplied by.
  static constexpr int matrix(int place) { return place; }

  // One place of B^T d.
  template <class Input>
  static Vec spread(int place, Input d) {
    switch (place) {
      case 0: return d(0) - d(2);
      case 1: return d(1) + d(2);
      case 2: return d(2) - d(1);
      default: return d(1) - d(3);
    }
  }

  // A^T m.
  static void gather(const Vec (&m)[kPlaces], Vec& first, Vec& second) {
    first = m[0] + m[1] + m[2];
    second = m[1] - m[2] - m[3];
  }
};

// 5 products instead of 6: the outer two weights meet every second input, by F(2, 2) with 3 products, and the middle weight
// meets the others.
struct Stride2 {
  static constexpr int kInputs = 5, kPlaces = 5;

  static constexpr int matrix(int place) { return place == 4 ? 2 : place; }

  template <class Input>
  static Vec spread(int place, Input d) {
    switch (place) {
      case 0: return d(0) - d(2);
      case 1: return d(2);
      case 2: return d(1);
      case 3: return d(2) - d(4);
      default: return d(3);
    }
  }

  static void gather(const Vec (&m)[kPlaces], Vec& first, Vec& second) {
    first = m[0] + m[1] + m[2];
    second = m[1] - m[3] + m[4];
  }
};

struct Geometry {
  int64_t out_height, out_width, tiles_y, tiles_x, tiles, panels, blocks;
  int64_t groups = 1;  // of panels

  explicit Geometry(const PackedConvParams& params)
      : out_height(params.out_height()),
        out_width(params.out_width()),
        tiles_y((out_height + 1) / 2),
        tiles_x((out_width + 1) / 2),
        tiles(params.batch * tiles_y * tiles_x),
        panels(panels_of(params.outputs)),
        blocks((tiles + kBlockTiles - 1) / kBlockTiles) {
    if (params.threads == 1 || blocks == 0) return;
    // With few blocks the panels are divided too, and each group transforms the inputs for itself. More blocks would read the
    // weights more often, so there are only if there are too few panels.
    const int64_t wanted = kTasksPerThread * params.threads;
    blocks = std::max(blocks, std::min(wanted / panels, tiles / kLeastTiles));
    if (blocks > params.threads) blocks = (blocks + params.threads - 1) / params.threads * params.threads;
    groups = std::clamp<int64_t>(wanted / blocks, 1, panels);
  }
};

// Goes through the tiles of a block.
struct Walk {
  int64_t out_height, out_width;
  int64_t image, row, column;  // of the tile's first output
  // The tiles before this one in the block: [1] counts only those with a second row, [][1] only those with a second column.
  // That is where the tile lies in a place.
  int64_t rank[2][2] = {};

  Walk(const Geometry& geometry, int64_t tile)
      : out_height(geometry.out_height),
        out_width(geometry.out_width),
        image(tile / (geometry.tiles_y * geometry.tiles_x)),
        row(tile / geometry.tiles_x % geometry.tiles_y * 2),
        column(tile % geometry.tiles_x * 2) {}

  void next() {
    const int64_t two_rows = row + 1 < out_height, two_columns = column + 1 < out_width;
    rank[0][0] += 1;
    rank[0][1] += two_columns;
    rank[1][0] += two_rows;
    rank[1][1] += two_rows & two_columns;
    if ((column += 2) < out_width) return;
    column = 0;
    if ((row += 2) < out_height) return;
    row = 0;
    ++image;
  }
};

template <class Axis>
struct Workspace {
  static constexpr int64_t kPlaces = Axis::kPlaces * Axis::kPlaces;
  // From place to place, known at compile time because there are too many for a register each. The additional line keeps the
  // places of a tile from evicting one another.
  static constexpr int64_t kInputsStep = kBlockTiles * kRunInputs + kCacheLine;
  static constexpr int64_t kSumsStep = kBlockTiles * kPanel + kCacheLine;
  float* patch;   // [row][column][input] of a tile
  float* inputs;  // [run][place][tile][kRunInputs]
  float* sums;    // [place][tile][kPanel]

  Workspace(Arena& arena, int64_t inputs) {
    patch = arena.take(Axis::kInputs * Axis::kInputs * inputs + kLanes);
    this->inputs = arena.take((inputs + kRunInputs - 1) / kRunInputs * kPlaces * kInputsStep);
    sums = arena.take(kPlaces * kSumsStep);
  }
};

// The inputs of a tile, whose pixels follow one another. Behind the last there is room for a whole vector.
struct Patch {
  const float* first;
  int64_t row_floats;  // from row to row
};

// Inside the image it is read where it lies; at the border, and in other strides, it is copied to `copy`.
template <class Axis>
Patch read_tile(const PackedConvParams& params, const Walk& at, float* copy) {
  const int64_t inputs = params.inputs, *stride = params.x.stride;
  const int64_t top = at.row * params.stride - 1, left = at.column * params.stride - 1;
  const float* image = params.x.data + at.image * stride[0];
  const bool whole = stride[3] == 1 && stride[2] == inputs;
  if (whole && inputs % kLanes == 0 && top >= 0 && left >= 0 && top + Axis::kInputs <= params.height &&
      left + Axis::kInputs <= params.width)
    return {image + top * stride[1] + left * inputs, stride[1]};
  const int64_t row_floats = Axis::kInputs * inputs;
  const int64_t begin = std::max<int64_t>(left, 0), end = std::min(left + Axis::kInputs, params.width);
  float* to = copy;
  for (int64_t i = top; i < top + Axis::kInputs; ++i, to += row_floats) {
    std::fill_n(to, row_floats, 0.0f);
    if (i < 0 || i >= params.height) continue;
    const float* from = image + i * stride[1] + begin * stride[2];
    float* inside = to + (begin - left) * inputs;
    if (whole) {
      std::copy_n(from, (end - begin) * inputs, inside);
    } else {
      for (int64_t j = 0; j < end - begin; ++j)
        for (int64_t c = 0; c < inputs; ++c) inside[j * inputs + c] = from[j * stride[2] + c * stride[3]];
    }
  }
  return {copy, row_floats};
}

// Transforms a tile. Places that it lacks are written where those of a later tile will be.
template <class Axis>
void transform_inputs(const Patch& patch, int64_t channels, const Walk& at, const Workspace<Axis>& space) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    float* to = space.inputs + c / kRunInputs * (Workspace<Axis>::kPlaces * Workspace<Axis>::kInputsStep) + c % kRunInputs;
#pragma GCC unroll 5
    for (int y = 0; y < Axis::kPlaces; ++y) {
      Vec d[Axis::kInputs];
#pragma GCC unroll 5
      for (int x = 0; x < Axis::kInputs; ++x)
        d[x] = Axis::spread(y, [&](int i) { return load(patch.first + i * patch.row_floats + x * channels + c); });
#pragma GCC unroll 5
      for (int x = 0; x < Axis::kPlaces; ++x)
        store(to + at.rank[y >= kSecond][x >= kSecond] * kRunInputs + (Axis::kPlaces * y + x) * Workspace<Axis>::kInputsStep,
              Axis::spread(x, [&](int i) { return d[i]; }));
    }
  }
}

// One panel of the outputs of the tiles that `at` goes through.
template <class Axis, bool kGelu>
void write_tiles(const PackedConvParams& params, Walk at, int64_t tiles, const Workspace<Axis>& space, int64_t first) {
  const int64_t out_height = at.out_height, out_width = at.out_width;
  const int64_t count = std::min(kPanel, params.outputs - first);
  for (int64_t t = 0; t < tiles; ++t, at.next()) {
    float* out = params.out + ((at.image * out_height + at.row) * out_width + at.column) * params.outputs + first;
    // A panel is a small piece of each pixel: too far from the next one for the hardware to see where the results go.
    for (int64_t c = 0; c < count; c += kCacheLine)
      for (int k = 0; k < 4; ++k)
        __builtin_prefetch(out + (k / 2 * out_width + k % 2 + 2 * kPrefetchedTiles) * params.outputs + c, 1);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - c));
      Vec rows[2][Axis::kPlaces], y[4], bias = load_lanes(params.bias + first + c, lanes);
#pragma GCC unroll 5
      for (int x = 0; x < Axis::kPlaces; ++x) {
        Vec m[Axis::kPlaces];
#pragma GCC unroll 5
        for (int y = 0; y < Axis::kPlaces; ++y)
          m[y] = load(space.sums + at.rank[y >= kSecond][x >= kSecond] * kPanel + c +
                      (Axis::kPlaces * y + x) * Workspace<Axis>::kSumsStep);
        Axis::gather(m, rows[0][x], rows[1][x]);
      }
      Axis::gather(rows[0], y[0], y[1]);
      Axis::gather(rows[1], y[2], y[3]);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        if (at.row + k / 2 >= out_height || at.column + k % 2 >= out_width) continue;
        const Vec value = kGelu ? gelu(y[k] + bias).value : y[k] + bias;
        store_lanes(out + (k / 2 * out_width + k % 2) * params.outputs + c, value, lanes);
      }
    }
  }
}

template <class Axis>
int convolve(const PackedConvParams& params) {
  const Geometry geometry(params);
  const int64_t all = geometry.tiles, panels = geometry.panels, inputs = params.inputs;
  const int64_t floats = floats_of<Workspace<Axis>>(inputs);
  const auto write = params.gelu ? write_tiles<Axis, true> : write_tiles<Axis, false>;
  std::atomic<bool> failed{false};
  parallel_for(geometry.blocks * geometry.groups, params.threads, [&](int64_t task) {
    float* memory = Scratch::floats(floats);
    if (!memory) {
      failed = true;
      return;
    }
    Arena arena(memory);
    const Workspace<Axis> space(arena, inputs);
    const int64_t block = task / geometry.groups, group = task % geometry.groups;
    const int64_t begin = all * block / geometry.blocks, tiles = all * (block + 1) / geometry.blocks - begin;
    Walk end(geometry, begin);
    for (int64_t t = 0; t < tiles; ++t, end.next())
      transform_inputs<Axis>(read_tile<Axis>(params, end, space.patch), inputs, end, space);
    for (int64_t panel = panels * group / geometry.groups; panel < panels * (group + 1) / geometry.groups; ++panel) {
      auto weights = [&](int64_t place) {  // the first place of the next panel follows the last one
        constexpr int64_t kAll = Workspace<Axis>::kPlaces, kRow = Axis::kPlaces;
        const int y = static_cast<int>(place % kAll / kRow), x = static_cast<int>(place % kRow);
        const int64_t matrix = kMatrices * Axis::matrix(y) + Axis::matrix(x);
        return params.packed + (matrix * panels + panel + place / kAll) * kPanel * inputs;
      };
      for (int y = 0; y < Axis::kPlaces; ++y)
        for (int x = 0; x < Axis::kPlaces; ++x) {
          const int64_t place = Axis::kPlaces * y + x, rows = end.rank[y >= kSecond][x >= kSecond];
          PanelProduct product{};
          product.x = space.inputs + place * Workspace<Axis>::kInputsStep;
          product.x_stride = product.depth = kRunInputs;
          product.segments = (inputs + kRunInputs - 1) / kRunInputs;
          product.segment_stride = Workspace<Axis>::kPlaces * Workspace<Axis>::kInputsStep;
          product.last_depth = inputs - (product.segments - 1) * kRunInputs;
          product.weights = weights(place);
          fetch_next(product, rows, weights(place + 1), inputs);
          product.out = space.sums + place * Workspace<Axis>::kSumsStep;
          product.out_stride = kPanel;
          run_panel(product, rows, params.outputs - panel * kPanel);
        }
      write(params, Walk(geometry, begin), tiles, space, panel * kPanel);
    }
  });
  Scratch::trim();
  return failed;
}

}  // namespace

// Of `params.packed` there are kMatrices x kMatrices matrices of outputs, in whole panels, times inputs.
PPMA_EXPORT int ppma_winograd_conv(const PackedConvParams* params) {
  return params->stride == 1 ? convolve<Stride1>(*params) : convolve<Stride2>(*params);
}
