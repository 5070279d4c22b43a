// Rotary embeddings of outputs that are rows in memory.
#pragma once

#include <cstdint>

#include "simd.h"

namespace ppma {

// Columns [0, columns) of a row are heads of head_dim channels; the angles of row r are row r % tokens of the tables
// (tokens, head_dim / 2). Columns are whole vectors, each of which may hold several heads or a part of one: head_dim is a
// divisor or a multiple of kLanes.
struct Rotation {
  const float *cosine, *sine;
  int64_t columns, head_dim, tokens;
};

// Rotates rows [row, row + rows), the first of which is at `data`, `stride` apart, in place: of the columns from `column` on
// as many as are rotated, `vectors` vectors at the most. `direction` is 1, or -1 to rotate back.
template <int kVectors>
void rotate(const Rotation& rotation, float* data, int64_t stride, int64_t row, int64_t rows, int64_t column,
            float direction = 1.0f) {
  const int64_t pairs = rotation.head_dim / 2, count = rotation.columns - column;
  const IntVec odd = (lane_index() & 1) != 0, swap = lane_index() ^ 1, pair_of = lane_index() / 2;
  const Vec signs = select(odd, splat(direction), splat(-direction));
  int64_t at[kVectors] = {};  // the first pair of each vector
  for (int v = 0; v < kVectors; ++v) at[v] = (column + v * kLanes) % rotation.head_dim / 2;
  // One number of a table for each pair of channels.
  auto table = [&](const float* from) {
    if (pairs >= kLanes / 2) return shuffle(load_part(from, kLanes / 2), pair_of);
    Vec repeated;
    for (int lane = 0; lane < kLanes; ++lane) repeated[lane] = from[lane / 2 % pairs];
    return repeated;
  };
  for (int64_t r = 0, token = row % rotation.tokens; r < rows; ++r, data += stride) {
    for (int v = 0; v < kVectors && v * kLanes < count; ++v) {
      Vec x = load(data + column + v * kLanes), sines = table(rotation.sine + token * pairs + at[v]);
      Vec cosines = table(rotation.cosine + token * pairs + at[v]);
      store(data + column + v * kLanes, x * cosines + shuffle(x, swap) * (signs * sines));
    }
    if (++token == rotation.tokens) token = 0;
  }
}

}  // namespace ppma
