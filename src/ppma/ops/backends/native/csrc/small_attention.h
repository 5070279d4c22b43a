// Full attention on grids whose keys all fit in the second-level cache.
#pragma once

#include <cstdint>

#include "parallel.h"
#include "params.h"

namespace ppma {

// Where the results of full attention go. `stats` and `first` are what the backward pass needs; null if there is none.
struct AttentionResults {
  const View& out;  // (batch, heads, height, width, dv)
  float* stats;     // (2 * softmaxes, batch, heads, height, width): each one's largest logit and sum of exp(logit - it)
  float* first;     // (batch, heads, height, width, dv): the output of the first of two softmaxes; null unless `saves_first_output`
};

// What computes a head whose scores `small_attention` cannot save for a backward pass.
struct AnyScores {
  int64_t shared_floats, own_floats;
  void (*run)(const AttentionParams& params, const AttentionResults& results, int64_t task, Team team, float* shared,
              float* own);
};

// Whether `small_attention` serves this grid.
bool is_small(const AttentionParams& params);

// Returns 1 if there is no memory.
int small_attention(const AttentionParams& params, const AttentionResults& results, const AnyScores& any_scores);

}  // namespace ppma
