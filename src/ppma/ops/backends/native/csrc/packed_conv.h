// A 3x3 convolution for inference with the weights packed in advance: out = act(conv(x) + bias), zeros around the image.
#pragma once

#include "view.h"

namespace ppma {

// Mirrors `_PARAMS` of fused_conv.py.
struct PackedConvParams {
  View x;               // (batch, height, width, inputs), in any strides
  const float* packed;  // from ppma_pack_linear, of the weight as (outputs, 3 * 3 * inputs) or as winograd.cpp has it
  const float* bias;    // (outputs)
  float* out;           // (batch, out_height, out_width, outputs), contiguous
  int64_t batch, height, width, inputs, outputs;
  int64_t stride;       // 1 or 2
  int32_t gelu;
  int32_t threads;

  int64_t out_height() const { return (height + stride - 1) / stride; }
  int64_t out_width() const { return (width + stride - 1) / stride; }
  int64_t image_floats() const { return out_height() * out_width() * outputs; }
};

}  // namespace ppma
