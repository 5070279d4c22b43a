// The product that all packed ones consist of: rows of the left factor times one panel of packed weights.
//
// Weights are packed as [panel][input][kPanel outputs]. A few rows at a time, a tile, have their sums in registers, each
// over the inputs in ascending order.
#pragma once

#include <algorithm>

#include "simd.h"

namespace ppma {

constexpr int kTileRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPanelVectors = 4;  // 24 sums, four vectors of weights and one input in 32 registers
#else
constexpr int kPanelVectors = 2;  // 12 sums in 16 registers
#endif
constexpr int64_t kPanel = kPanelVectors * kLanes;

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// Rows in tiles of nearly equal height: 14 rows are 5 + 5 + 4 and not 6 + 6 + 2, whose last tile would wait on itself.
struct Tiles {
  int64_t count, low, high;  // the first `high` tiles have low + 1 rows, the others `low`

  explicit Tiles(int64_t rows)
      : count((rows + kTileRows - 1) / kTileRows), low(count ? rows / count : 0), high(count ? rows % count : 0) {}
  int64_t rows(int64_t tile) const { return low + (tile < high); }
  int64_t first(int64_t tile) const { return tile * low + std::min(tile, high); }
};

// Rows copied tile by tile, [tile][run][kTileRows][kRunInputs]: what a product reads of a tile then lies side by side, as
// the prefetcher expects it, and rows a power of two apart do not evict one another.
constexpr int64_t kRunInputs = 16;

inline int64_t tile_floats(int64_t inputs) { return (inputs + kRunInputs - 1) / kRunInputs * kRunInputs * kTileRows; }
// Where input c of a row lies behind the first one.
inline int64_t run_offset(uint64_t c) { return c / kRunInputs * (kTileRows * kRunInputs) + c % kRunInputs; }

// Rows and a panel. Null pointers leave their part out.
struct PanelProduct {
  const float* x;                             // the first row
  int64_t x_stride;                           // from row to row of a tile
  int64_t tile_stride;                        // from tile to tile; 0 if the rows follow one another across tiles
  int64_t segments, segment_stride, depth;    // a row is `segments` runs of `depth` inputs, segment_stride apart
  int64_t last_depth;                         // of the last of these runs
  const float* weights;                       // of the panel, from the first of these inputs on
  const float* next;                          // weights to fetch while this product runs
  int64_t next_lines;                         // cache lines of them for each run of a tile
  const float* bias;                          // of the panel's outputs
  const float* start;                         // what the sums start from besides the bias; may be `out` itself
  int64_t start_stride;
  float* out;
  int64_t out_stride;
  bool gelu;
};

// Has the product of `rows` rows, whose runs are known, fetch the `inputs` of the panel at `next`. A panel fits the
// first-level cache, but the weights of large layers come from memory, and the first tile would wait for all of a panel.
inline void fetch_next(PanelProduct& product, int64_t rows, const float* next, int64_t inputs) {
  const int64_t runs = Tiles(rows).count * product.segments, lines = inputs * kPanel / kCacheLine;
  product.next = next;
  product.next_lines = runs ? (lines + runs - 1) / runs : 0;
}

// Runs the product for `rows` rows; of the panel the first `outputs` exist.
void run_panel(const PanelProduct& product, int64_t rows, int64_t outputs);

}  // namespace ppma
