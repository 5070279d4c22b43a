// Tensors as the Python side passes them: a pointer and strides in elements, never a copy.
#pragma once

#include <cstdint>

#define PPMA_EXPORT extern "C" __attribute__((visibility("default")))

// Mirrors `View` of library.py. A stride may be 0 (an expanded axis); the last axis of values has stride 1.
struct View {
  float* data;
  int64_t stride[5];

  float* at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return data + b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
  }
};
