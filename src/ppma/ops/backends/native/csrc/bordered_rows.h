// Rows of a channel-last image with a border of zeros, as the convolutions read them.
#pragma once

#include <cstring>

#include "view.h"

namespace ppma {

// Copies rows [first, first + rows) of an image: `inputs` zeros, the pixels in order, and zeros up to row_floats. Rows outside
// the image are 0.
inline void copy_bordered(const View& x, int64_t image, int64_t height, int64_t width, int64_t inputs, int64_t first,
                          int64_t rows, int64_t row_floats, float* to) {
  const int64_t* stride = x.stride;
  for (int64_t y = first; y < first + rows; ++y, to += row_floats) {
    if (y < 0 || y >= height) {
      std::memset(to, 0, sizeof(float) * row_floats);
      continue;
    }
    const float* from = x.data + image * stride[0] + y * stride[1];
    float *inside = to + inputs, *behind = inside + width * inputs;
    std::memset(to, 0, sizeof(float) * inputs);
    std::memset(behind, 0, sizeof(float) * (to + row_floats - behind));
    if (stride[3] == 1 && stride[2] == inputs) {
      std::memcpy(inside, from, sizeof(float) * width * inputs);
    } else {
      for (int64_t c = 0; c < inputs; ++c)
        for (int64_t j = 0; j < width; ++j) inside[j * inputs + c] = from[j * stride[2] + c * stride[3]];
    }
  }
}

}  // namespace ppma
