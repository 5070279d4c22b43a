// The arguments of linear attention, and its scans: x is K outer V, one feature of k and one vector of v at a time.
#pragma once

#include "plane_scan.h"
#include "view.h"

// Mirrors `LinearParams` of linear.py.
struct LinearParams {
  View q, k, v;                // (batch, heads, height, width, d or dv)
  const float *alpha, *beta;   // decays, contiguous (batch, heads, height, width), 0 on the edges outside the grid
  int64_t batch, heads, height, width, d, dv;
  int64_t mode;  // ppma::Mode
  int64_t threads;
};

namespace ppma {

// A row of K outer V.
struct OuterRow {
  const float* scalars;
  int64_t step;
  Row vectors;

  PPMA_INLINE float scalar(int64_t j) const { return scalars[j * step]; }
  PPMA_INLINE Vec operator()(int64_t j) const { return scalar(j) * vectors(j); }
  PPMA_INLINE void prefetch(int64_t j) const {
    __builtin_prefetch(scalars + j * step, 0, 2);
    vectors.prefetch(j);
  }
};

// One channel of a tensor on a plane.
struct ScalarPlane {
  float* data;
  int64_t row_stride;
  int64_t pixel_stride;

  float* row(int64_t i) const { return data + i * row_stride; }
};

struct OuterPlane {
  ScalarPlane scalars;
  ChannelPlane vectors;

  OuterRow read(int64_t i, Row spare) const {
    return {scalars.row(i), scalars.pixel_stride, vectors.read(i, spare)};
  }

  OuterRow in_memory(int64_t i) const { return {scalars.row(i), scalars.pixel_stride, vectors.in_memory(i)}; }
};

// The plane of one image and head.
struct LinearPlane {
  const LinearParams& params;
  int64_t batch, head;

  LinearPlane(const LinearParams& params, int64_t plane)
      : params(params), batch(plane / params.heads), head(plane % params.heads) {}

  int64_t offset() const { return (batch * params.heads + head) * params.height * params.width; }
  Edges edges() const {
    return {params.alpha + offset(), params.beta + offset(), params.width, params.height, params.width};
  }

  ScalarPlane channel(const View& view, int64_t index) const {
    return {view.at(batch, head, 0, 0) + index * view.stride[4], view.stride[2], view.stride[3]};
  }

  // Vector `index` of `channels` channels.
  ChannelPlane vector(const View& view, int64_t index, int64_t channels) const {
    int64_t first = index * kLanes;
    return {view.at(batch, head, 0, 0) + first * view.stride[4],
            view.stride[2],
            view.stride[3],
            view.stride[4],
            std::min<int64_t>(kLanes, channels - first),
            params.width};
  }
};

}  // namespace ppma
