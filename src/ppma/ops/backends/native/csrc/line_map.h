// The masked attention map of one line: softmax(q k^T) * D or softmax(q k^T + log D).
#pragma once

#include <cstdint>

#include "decay_matrix.h"
#include "parallel.h"
#include "params.h"
#include "product.h"
#include "simd.h"

namespace ppma {

// Memory for the map of a line of up to `n` tokens. Matrices have rows padded to whole vectors.
struct LineScratch {
  float* queries;     // n x d
  float* keys;        // d x n
  float* decays;      // n x n
  float* potentials;  // Potentials
  float* products;    // DecayProducts
  float* lanes;       // n x kLanes: sums of a row that are still to be added up

  LineScratch(Arena& arena, int64_t n, int64_t d)
      : queries(arena.take(n * padded(d))),
        keys(arena.take(d * padded(n))),
        decays(arena.take(n * padded(n))),
        potentials(arena.take(Potentials::size(n))),
        products(arena.take(DecayProducts::size(n))),
        lanes(arena.take(padded(n) * kLanes)) {}
};

// Fetches channels of a line that comes next, if it exists: they lie too far apart for the hardware to see them coming.
inline void prefetch(const Line& line, const View& view, int64_t channels) {
  if (!line.exists()) return;
  Tokens tokens = line.of(view);
  for (int64_t l = 0; l < line.size(); ++l)
    for (int64_t c = 0; c < channels; c += kCacheLine) __builtin_prefetch(tokens.data + l * tokens.stride + c);
}

// The map with each row still to be multiplied by its number in `row_scale`, which has room for whole vectors.
template <bool kLogit>
void line_map(const Line& line, const LineScratch& scratch, float* weights, float* row_scale);

// The softmax, and the map that multiplies the values: the same for "logit", where `weights` is not written.
template <bool kLogit>
void line_map_and_softmax(const Line& line, const LineScratch& scratch, float* softmax, float* weights, float* row_scale);

// From the gradient of the map to that of the scores, in place, and to that of the line's log-decays.
template <bool kLogit>
void line_map_backward(const Line& line, const float* softmax, const float* weights, float* gradient, float* potentials,
                       const View& grad_log_decay) {
  int64_t n = line.size(), width = padded(n);
  for (int64_t l = 0; l < width; l += kLanes) store(potentials + l, Vec{});
  for (int64_t j = 0; j < n; ++j) {
    const float *p = softmax + j * width, *w = weights + j * width;
    float* g = gradient + j * width;
    Vec total{};
    for (int64_t l = 0; l < width; l += kLanes) total += load(w + l) * load(g + l);
    float mean = sum(total);
    Vec across{};
    for (int64_t l = 0; l < width; l += kLanes) {
      Vec weighted = load(w + l) * load(g + l);
      Vec of_score = weighted - load(p + l) * mean;
      store(g + l, of_score);
      // "logit": the log mask is added to the score; d log D = softmax * D * gradient for "hadamard".
      Vec of_log = signed_by_position(kLogit ? of_score : weighted, j, l);
      store(potentials + l, load(potentials + l) + of_log);
      across += of_log;
    }
    potentials[j] -= sum(across);
  }
  Tokens log = line.of(line.log_decay()), grad = line.of(grad_log_decay);
  log_decay_gradient(potentials, 1, log.data, log.stride, n, grad.data, grad.stride);
}

}  // namespace ppma
