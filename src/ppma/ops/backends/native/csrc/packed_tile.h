// The product that all packed ones consist of: rows of the left factor times one panel of packed weights.
//
// Weights are packed as [panel][input][kPanel outputs]. A few rows at a time, a tile, have their sums in registers, each
// over the inputs in ascending order.
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

// Rows and a panel. Null pointers leave their part out.
struct PanelProduct {
  const float* x;                             // the first row
  int64_t x_stride;                           // from row to row
  int64_t segments, segment_stride, depth;    // a row is `segments` runs of `depth` inputs, segment_stride apart
  const float* weights;                       // of the panel, from the first of these inputs on
  const float* bias;                          // of the panel's outputs
  const float* start;                         // what the sums start from besides the bias; may be `out` itself
  int64_t start_stride;
  float* out;
  int64_t out_stride;
  bool gelu;
};

// Runs the product for `rows` rows; of the panel the first `outputs` exist.
void run_panel(const PanelProduct& product, int64_t rows, int64_t outputs);

}  // namespace ppma
