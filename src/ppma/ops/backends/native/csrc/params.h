// The arguments that the softmax attentions have in common.
#pragma once

#include <cstdint>

#include "view.h"

namespace ppma {

// Mirrors `AttentionParams` of params.py.
struct AttentionParams {
  View q, k, v;              // (batch, heads, height, width, d or dv)
  View log_alpha, log_beta;  // (batch, heads, height, width)
  int64_t batch, heads, height, width, d, dv;
  float scale;
  int32_t logit;     // softmax(s + log mask), paths averaged; else softmax(s) * mask, paths summed
  int32_t v2h, h2v;  // which paths
  int32_t threads;
  const float* key_bias;  // (batch, height, width), added to the scores: 0, or -inf for invalid keys; null for all valid

  int64_t tokens() const { return height * width; }
  int64_t longest_line() const { return height > width ? height : width; }

  // What each path counts in the output.
  float path_weight() const { return logit && v2h && h2v ? 0.5f : 1.0f; }
};

// Mirrors `Gradients` of params.py: the gradient of the output, and those of the inputs, which are written.
struct Gradients {
  View out;
  View q, k, v;
  View log_alpha, log_beta;
};

// Channels of neighbouring tokens of a line, `stride` floats apart.
struct Tokens {
  float* data;
  int64_t stride;
};

// A row or a column of one head's grid.
struct Line {
  const AttentionParams& params;
  int64_t batch, head;
  bool row;
  int64_t index;

  int64_t size() const { return row ? params.width : params.height; }
  bool exists() const { return index < (row ? params.height : params.width); }
  const View& log_decay() const { return row ? params.log_alpha : params.log_beta; }

  Tokens of(const View& view) const {
    return {view.at(batch, head, row ? index : 0, row ? 0 : index), view.stride[row ? 3 : 2]};
  }

  // Of the line's keys, `key_bias_stride` apart; null if all are valid.
  const float* key_bias() const {
    if (!params.key_bias) return nullptr;
    return params.key_bias + batch * params.tokens() + index * (row ? params.width : 1);
  }
  int64_t key_bias_stride() const { return row ? 1 : params.width; }

  bool all_valid() const {
    const float* bias = key_bias();
    for (int64_t l = 0; bias && l < size(); ++l)
      if (bias[l * key_bias_stride()] != 0.0f) return false;
    return true;
  }

  // Of a head's grid in scratch memory, `channels` floats a token.
  Tokens of(float* grid, int64_t channels) const {
    int64_t along_row = channels, along_column = params.width * channels;
    return {grid + index * (row ? along_column : along_row), row ? along_row : along_column};
  }
};

}  // namespace ppma
