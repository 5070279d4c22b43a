// What the scan functions are given: tensors with the axes (batch..., H, W, C) of the plane that is scanned, whichever
// axes of the grid H and W are; all others are batch axes.
#pragma once

#include "plane.h"
#include "plane_scan.h"

// Mirrors `PlaneTensor` of scan.py. Decays and their gradients are contiguous in the order of the grid: no stride for W,
// and no C.
struct PlaneTensor {
  float* data;
  const int64_t* strides;
};

// Mirrors `ScanParams` of scan.py.
struct ScanParams {
  int64_t mode;  // ppma::Mode
  int64_t batch_axes;
  const int64_t* sizes;     // batch..., H, W, C
  PlaneTensor x;
  PlaneTensor alpha, beta;  // decays, 0 on the edges outside the grid; without row scans alpha is not read
  int64_t add;              // to the result, or to the gradient of x, instead of overwriting it
  int64_t threads;
};

namespace ppma {

struct Geometry {
  const ScanParams& params;
  int64_t chunk;  // a plane that is scanned by columns alone is cut into pieces of so many columns

  explicit Geometry(const ScanParams& params) : params(params), chunk(width()) {
    // So that x and y of a piece stay in cache from the walk inwards to the walk outwards.
    constexpr int64_t kPieceFloats = 1 << 16;
    if (params.mode == kColumns) chunk = std::clamp<int64_t>(kPieceFloats / (height() * kLanes), 1, width());
  }

  int64_t height() const { return params.sizes[params.batch_axes]; }
  int64_t width() const { return params.sizes[params.batch_axes + 1]; }
  int64_t channels() const { return params.sizes[params.batch_axes + 2]; }
  int64_t vectors() const { return (channels() + kLanes - 1) / kLanes; }
  int64_t chunks() const { return (width() + chunk - 1) / chunk; }
  int64_t planes() const {
    int64_t count = chunks();
    for (int64_t axis = 0; axis < params.batch_axes; ++axis) count *= params.sizes[axis];
    return count;
  }

  int64_t first_column(int64_t plane) const { return plane % chunks() * chunk; }
  int64_t columns(int64_t plane) const { return std::min(chunk, width() - first_column(plane)); }

  // Where a plane of a tensor begins.
  float* at(const PlaneTensor& tensor, int64_t plane, int64_t column_stride) const {
    float* data = tensor.data + first_column(plane) * column_stride;
    int64_t index = plane / chunks();
    for (int64_t axis = params.batch_axes - 1; axis >= 0; --axis) {
      data += index % params.sizes[axis] * tensor.strides[axis];
      index /= params.sizes[axis];
    }
    return data;
  }

  Edges edges(int64_t plane) const {
    return {at(params.alpha, plane, 1), at(params.beta, plane, 1), params.beta.strides[params.batch_axes], height(),
            columns(plane)};
  }

  ChannelPlane channels(const PlaneTensor& tensor, int64_t plane, int64_t vector) const {
    const int64_t* strides = tensor.strides + params.batch_axes;
    int64_t first = vector * kLanes;
    return {at(tensor, plane, strides[1]) + first * strides[2], strides[0], strides[1], strides[2],
            std::min<int64_t>(kLanes, channels() - first), columns(plane)};
  }
};

}  // namespace ppma
