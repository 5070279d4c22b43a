// Planes of H x W pixels as the scans walk through them: one vector of channels and one row at a time.
#pragma once

#include <algorithm>
#include <utility>

#include "parallel.h"
#include "simd.h"

namespace ppma {

// Lambdas and arrays of vectors stay in registers only if everything around them is one function.
#define PPMA_INLINE __attribute__((always_inline))

// body(0), ..., body(N - 1) with constants for arguments.
template <class Body, int... n>
PPMA_INLINE inline void unrolled(Body& body, std::integer_sequence<int, n...>) {
  (body(std::integral_constant<int, n>{}), ...);
}
template <int N, class Body>
PPMA_INLINE inline void unrolled(Body body) {
  unrolled(body, std::make_integer_sequence<int, N>{});
}

// One vector for each pixel of a row, `step` floats from pixel to pixel.
struct Row {
  float* data;
  int64_t step = kLanes;

  PPMA_INLINE Vec operator()(int64_t j) const { return load(data + j * step); }
  PPMA_INLINE void put(int64_t j, Vec x) const { store(data + j * step, x); }
  // Fetches pixel j, which will be read soon, or also written, into the second-level cache.
  template <bool write = false>
  PPMA_INLINE void prefetch(int64_t j) const {
    __builtin_prefetch(data + j * step, write, 2);
  }
};

inline Row take_row(Arena& arena, int64_t width) { return {arena.take(width * kLanes)}; }

// The column states of a row, those of a pixel adjacent.
template <int States>
struct StateRow {
  float* data;

  static int64_t floats(int64_t width) { return States * width * kLanes; }
  PPMA_INLINE Vec operator()(int state, int64_t j) const { return load(data + (j * States + state) * kLanes); }
  PPMA_INLINE void put(int state, int64_t j, Vec x) const { store(data + (j * States + state) * kLanes, x); }
};

// A vector of a tensor's channels on a plane. Rows are read and written in place where the channels are contiguous and
// fill the vector; else they go through a scratch row, padded with zeros.
struct ChannelPlane {
  float* data;
  int64_t row_stride;
  int64_t pixel_stride;
  int64_t channel_stride;
  int64_t channels;  // at most kLanes
  int64_t width;

  bool in_place() const { return channel_stride == 1 && channels == kLanes; }
  float* row(int64_t i) const { return data + i * row_stride; }

  Row read(int64_t i, Row spare) const {
    if (in_place()) return in_memory(i);
    int count = static_cast<int>(channels);
    for (int64_t j = 0; j < width; ++j) {
      const float* from = row(i) + j * pixel_stride;
      if (channel_stride == 1) {
        spare.put(j, load_part(from, count));
      } else {
        Vec value{};
        for (int c = 0; c < count; ++c) value[c] = from[c * channel_stride];
        spare.put(j, value);
      }
    }
    return spare;
  }

  // Where to write row i, with its present contents if they are `kept`; `write_back` must follow.
  Row writable(int64_t i, Row spare, bool kept) const {
    return kept ? read(i, spare) : in_place() ? in_memory(i) : spare;
  }

  void write_back(int64_t i, Row spare) const {
    if (in_place()) return;
    int count = static_cast<int>(channels);
    for (int64_t j = 0; j < width; ++j) {
      float* to = row(i) + j * pixel_stride;
      if (channel_stride == 1) {
        store_part(to, spare(j), count);
      } else {
        for (int c = 0; c < count; ++c) to[c * channel_stride] = spare.data[j * spare.step + c];
      }
    }
  }

  Row in_memory(int64_t i) const { return {row(i), pixel_stride}; }
};

// Decays of a plane's edges: alpha along rows, beta along columns, 0 on the edges outside the grid.
struct Edges {
  const float* alpha;
  const float* beta;
  int64_t row_stride;
  int64_t height;
  int64_t width;

  const float* along(int64_t i) const { return alpha + i * row_stride; }
  // The edges between rows i - 1 and i. At i = height any finite numbers serve: they multiply states that are 0.
  const float* above(int64_t i) const { return beta + std::min(i, height - 1) * row_stride; }
};

// The upper or the lower half of a plane, its rows counted from the plane's border to its middle.
//
// What flows down a column enters the upper half as nothing and the lower half as what leaves the upper one; what flows
// up does the opposite. So both halves can walk inwards at the same time and, after exchanging their states in the
// middle, outwards again.
struct Half {
  bool lower;
  Edges edges;

  int64_t rows() const { return lower ? edges.height / 2 : (edges.height + 1) / 2; }
  int64_t row(int64_t r) const { return lower ? edges.height - 1 - r : r; }
  // The edges from row r to its neighbour further out and further in.
  const float* outer(int64_t r) const { return edges.above(lower ? row(r) + 1 : row(r)); }
  const float* inner(int64_t r) const { return edges.above(lower ? row(r) : row(r) + 1); }
};

}  // namespace ppma
