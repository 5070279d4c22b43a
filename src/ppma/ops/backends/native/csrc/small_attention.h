// Full attention for inference on grids whose keys all fit in the second-level cache.
#pragma once

#include "params.h"

namespace ppma {

// Whether `small_attention` serves this grid.
bool is_small(const AttentionParams& params);

// Writes `out` and keeps nothing for a backward pass. Returns 1 if there is no memory.
int small_attention(const AttentionParams& params, const View& out);

}  // namespace ppma
