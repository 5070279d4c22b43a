// A block of a backbone for inference: positional convolution, masked attention, feed-forward.
#pragma once

#include "view.h"

namespace ppma {

// Mirrors `_IMAGES` and `_BLOCK` of fused_block.py. Weights of linear layers are packed by ppma_pack_linear, with the scales
// of the norms multiplied in; those of depthwise convolutions as packed_depthwise takes them.
struct BlockParams {
  const float* x;  // (batch, height, width, dim), contiguous
  float* out;      // the same; not x
  int64_t batch, height, width, dim, heads, hidden;
  const float* position;                  // 3x3, with 1 added to the centre
  const float* local;                     // 5x5, of the values
  const float* mix;                       // 3x3, of the hidden channels, with 1 added to the centre
  const float *qkv, *qkv_bias;            // (3 * dim, dim)
  const float *proj, *proj_bias;
  const float *expand, *expand_bias;
  const float *reduce, *reduce_bias;
  float attn_eps, ffn_eps;
  const float *cosine, *sine;             // (height * width, dim / heads / 2)
  int64_t decays;                         // learned for each head: 2, 1 if shared, 0 for none
  const float* decay;                     // (heads * decays, dim), not packed; 0 outside of the head's slice
  const float *decay_bias, *decay_rate;   // (heads * decays); no rate is 1
  const float* log_decay;                 // (heads), where none is learned
  int32_t softplus;
  int32_t full, logit, v2h, h2v, threads;
};

// `count` blocks, each of which reads what the one before it wrote: of the same batch, grid and channels. Returns 1 if there
// is no memory.
int run_blocks(const BlockParams* blocks, int64_t count);

}  // namespace ppma
