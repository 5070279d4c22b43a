// The tile that all packed products consist of: a few rows of the left factor times one panel of packed weights.
//
// Weights are packed as [panel][input][kPanel outputs]. The sums of a tile stay in registers, each over the inputs in
// ascending order.
#pragma once

#include "simd.h"

namespace ppma {

constexpr int kPanelVectors = 2;
constexpr int64_t kPanel = kPanelVectors * kLanes;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;  // 24 sums, two vectors of weights and one input in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums in 16 registers
#endif

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

// One tile. Null pointers leave their part out.
struct Tile {
  const float* x;                             // the first row
  int64_t x_stride;                           // from row to row
  int64_t segments, segment_stride, depth;    // a row is `segments` runs of `depth` inputs, segment_stride apart
  const float* weights;                       // of the panel, from the tile's first input on
  const float* bias;                          // of the tile's outputs
  const float* residual;                      // may be `out` itself
  int64_t residual_stride;
  float* out;
  int64_t out_stride;
  bool resume;  // the sums go on from what `out` holds: no bias, no residual
  bool gelu;
};

// Runs a tile of `rows` (at most kTileRows) rows, of whose panel the first `outputs` exist.
void run_tile(const Tile& tile, int64_t rows, int64_t outputs);

}  // namespace ppma
