// 3x3 convolutions of stride 1 by Winograd's F(2 x 2, 3 x 3): the 2 x 2 outputs of a tile come from 4 x 4 inputs d by
//
//   A^T [ (G g G^T) * (B^T d B) ] A
//
// with 16 products for every pair of channels instead of 36. Sums over the channels turn them into 16 packed products,
// one for each place of the 4 x 4. B and A hold only 0, 1 and -1; G g G^T is packed in advance (fused_conv.py).
//
// A task is a band of rows of tiles of one image. Every output is summed in the same order whatever the bands, so the bits do
// not depend on the number of threads.
#include <algorithm>

#include "bordered_rows.h"
#include "gelu.h"
#include "packed_conv.h"
#include "packed_tile.h"
#include "parallel.h"

using namespace ppma;

namespace {

constexpr int64_t kPlaces = 16;
constexpr int64_t kBandTiles = 64;  // of a task: a multiple of a row of tiles, so that both transforms stay in the cache

struct Geometry {
  int64_t tiles_x, tiles_y;
  int64_t band;        // rows of tiles of a task
  int64_t row_floats;  // of a copied row, with room for whole vectors behind the last pixel

  explicit Geometry(const PackedConvParams& params)
      : tiles_x((params.width + 1) / 2),
        tiles_y((params.height + 1) / 2),
        band(std::clamp<int64_t>(kBandTiles / std::max<int64_t>(tiles_x, 1), 1, std::max<int64_t>(tiles_y, 1))),
        row_floats((2 * tiles_x + 2) * params.inputs) {}
  int64_t bands() const { return (tiles_y + band - 1) / band; }
};

struct Workspace {
  float* copied;  // rows with their border
  float* inputs;  // kPlaces x tiles x inputs
  float* sums;    // kPlaces x tiles x outputs, in whole panels
  int64_t inputs_of_place, sums_of_place, columns;

  Workspace(Arena& arena, const PackedConvParams& params, const Geometry& geometry)
      : inputs_of_place(geometry.band * geometry.tiles_x * params.inputs + kLanes),
        columns(panels_of(params.outputs) * kPanel) {
    sums_of_place = geometry.band * geometry.tiles_x * columns;
    copied = arena.take((2 * geometry.band + 2) * geometry.row_floats + kLanes);
    inputs = arena.take(kPlaces * inputs_of_place);
    sums = arena.take(kPlaces * sums_of_place);
  }
};

// B^T d of four vectors.
inline void spread(const Vec (&d)[4], Vec (&to)[4]) {
  to[0] = d[0] - d[2];
  to[1] = d[1] + d[2];
  to[2] = d[2] - d[1];
  to[3] = d[1] - d[3];
}

// Transforms the tile whose upper left input is `from`, to vectors `place` floats apart. What a last vector has behind the
// channels belongs to the next tile, which comes later and overwrites it.
void transform_inputs(const float* from, int64_t row_floats, int64_t channels, float* to, int64_t place) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    Vec rows[4][4];  // [column][row of B^T d]
#pragma GCC unroll 4
    for (int x = 0; x < 4; ++x) {
      Vec d[4];
#pragma GCC unroll 4
      for (int y = 0; y < 4; ++y) d[y] = load(from + y * row_floats + x * channels + c);
      spread(d, rows[x]);
    }
#pragma GCC unroll 4
    for (int y = 0; y < 4; ++y) {
      Vec d[4] = {rows[0][y], rows[1][y], rows[2][y], rows[3][y]}, v[4];
      spread(d, v);
#pragma GCC unroll 4
      for (int x = 0; x < 4; ++x) store(to + (4 * y + x) * place + c, v[x]);
    }
  }
}

// A^T m of four vectors.
inline void gather(const Vec (&m)[4], Vec& first, Vec& second) {
  first = m[0] + m[1] + m[2];
  second = m[1] - m[2] - m[3];
}

// One vector of outputs of a tile, from sums `place` floats apart: y[2 * row + column].
inline void transform_sums(const float* from, int64_t place, Vec (&y)[4]) {
  Vec rows[2][4];
#pragma GCC unroll 4
  for (int x = 0; x < 4; ++x) {
    Vec m[4];
#pragma GCC unroll 4
    for (int y = 0; y < 4; ++y) m[y] = load(from + (4 * y + x) * place);
    gather(m, rows[0][x], rows[1][x]);
  }
  gather(rows[0], y[0], y[1]);
  gather(rows[1], y[2], y[3]);
}

template <bool kGelu>
void write_tile(const PackedConvParams& params, const Workspace& space, const float* sums, int64_t image, int64_t row,
                int64_t column) {
  for (int64_t c = 0; c < params.outputs; c += kLanes) {
    int lanes = static_cast<int>(std::min<int64_t>(kLanes, params.outputs - c));
    Vec bias = load_part(params.bias + c, lanes), y[4];
    transform_sums(sums + c, space.sums_of_place, y);
#pragma GCC unroll 4
    for (int place = 0; place < 4; ++place) {
      int64_t i = row + place / 2, j = column + place % 2;
      if (i >= params.height || j >= params.width) continue;
      float* to = params.out + ((image * params.height + i) * params.width + j) * params.outputs + c;
      Vec value = kGelu ? gelu(y[place] + bias).value : y[place] + bias;
      if (lanes == kLanes)
        store(to, value);
      else
        store_part(to, value, lanes);
    }
  }
}

}  // namespace

// Of `params.packed` there are kPlaces matrices of outputs, in whole panels, times inputs.
PPMA_EXPORT int ppma_winograd_conv(const PackedConvParams* given) {
  const PackedConvParams& params = *given;
  const Geometry geometry(params);
  const int64_t panels = panels_of(params.outputs), inputs = params.inputs;
  const int64_t floats = floats_of<Workspace>(params, geometry);
  std::atomic<bool> failed{false};
  parallel_for(params.batch * geometry.bands(), params.threads, [&](int64_t task) {
    float* memory = Scratch::floats(floats);
    if (!memory) {
      failed = true;
      return;
    }
    Arena arena(memory);
    Workspace space(arena, params, geometry);
    int64_t image = task / geometry.bands(), first = task % geometry.bands() * geometry.band;
    int64_t rows = std::min(geometry.band, geometry.tiles_y - first), tiles = rows * geometry.tiles_x;
    copy_bordered(params.x, image, params.height, params.width, inputs, 2 * first - 1, 2 * rows + 2, geometry.row_floats,
                  space.copied);
    for (int64_t t = 0; t < tiles; ++t)
      transform_inputs(space.copied + t / geometry.tiles_x * 2 * geometry.row_floats + t % geometry.tiles_x * 2 * inputs,
                       geometry.row_floats, inputs, space.inputs + t * inputs, space.inputs_of_place);
    for (int64_t place = 0; place < kPlaces; ++place)
      for (int64_t panel = 0; panel < panels; ++panel) {
        PanelProduct product{};
        product.x = space.inputs + place * space.inputs_of_place;
        product.x_stride = inputs;
        product.segments = 1;
        product.depth = product.last_depth = inputs;
        product.weights = params.packed + (place * panels + panel) * kPanel * inputs;
        product.out = space.sums + place * space.sums_of_place + panel * kPanel;
        product.out_stride = space.columns;
        run_panel(product, tiles, params.outputs - panel * kPanel);
      }
    auto write = params.gelu ? write_tile<true> : write_tile<false>;
    for (int64_t t = 0; t < tiles; ++t)
      write(params, space, space.sums + t * space.columns, image, 2 * (first + t / geometry.tiles_x),
            2 * (t % geometry.tiles_x));
  });
  Scratch::trim();
  return failed;
}
