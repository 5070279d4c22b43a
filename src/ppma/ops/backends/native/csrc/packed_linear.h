// A linear layer for inference: out = finish(normalise(x) W^T + bias), with the weights packed in advance.
#pragma once

#include "view.h"

namespace ppma {

// Mirrors `_PARAMS` of fused_linear.py. Rows are tokens; null pointers leave their part out.
struct PackedLinearParams {
  const float* x;  // (rows, inputs), rows x_stride apart
  int64_t x_stride;
  const float* packed;    // from ppma_pack_linear
  const float* bias;      // (outputs)
  const float* residual;  // (rows, outputs), rows residual_stride apart; may be `out` itself
  int64_t residual_stride;
  float* out;  // (rows, outputs), rows out_stride apart
  int64_t out_stride;
  int64_t rows, inputs, outputs;
  float norm_eps;  // of a layer norm of x without scale and shift; negative for none
  // Rotary embeddings: outputs [0, rotated) are heads of head_dim channels; the angles of row r are row r % tokens of the
  // tables (tokens, head_dim / 2).
  const float *cosine, *sine;
  int64_t rotated, head_dim, tokens;
  int threads;
};

// Log-decays that are computed of the same rows: -rate * activation(logits), with logits normalise(x) W^T + bias, of which
// each reads its head's slice of the inputs alone.
//
// Mirrors `_DECAYS` of fused_linear.py.
struct DecayColumns {
  // Of output o of head h for input c: weight[h * head_stride + o * output_stride + c], where c runs over the vectors that
  // meet the head's slice of the inputs, outside of which it is 0.
  const float* weight;
  int64_t head_stride, output_stride;
  const float *bias, *rate;  // (heads * outputs); no rate is 1
  float* out;                // (rows / tokens, heads * outputs, tokens)
  float* logits;             // like out; null where they are not wanted
  int64_t heads, outputs;
  int32_t softplus;  // else ReLU
};

// `decays` may be null.
int packed_linear(const PackedLinearParams& params, const DecayColumns* decays);

}  // namespace ppma
