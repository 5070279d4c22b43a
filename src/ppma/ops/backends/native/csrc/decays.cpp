// Log-decays to the decays of a grid's edges, as the scans read them.
#include <algorithm>

#include "parallel.h"
#include "simd.h"
#include "view.h"

using namespace ppma;

namespace {

// Exponentials of `count` floats, `stride` floats apart.
void exponentials(const float* from, int64_t stride, int64_t count, float* to) {
  for (int64_t j = 0; j < count; j += kLanes) {
    int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - j));
    Vec x{};
    if (stride == 1) {
      x = load_part(from + j, lanes);
    } else {
      for (int lane = 0; lane < lanes; ++lane) x[lane] = from[(j + lane) * stride];
    }
    store_part(to + j, ppma::exp(x), lanes);
  }
}

}  // namespace

// Reads log-decays with `axes` axes of these sizes and strides, writes decays contiguously, and 0 at index 0 of `edge_axis`,
// whose edges lie outside the grid and are never read.
PPMA_EXPORT int ppma_decays(int axes, const int64_t* sizes, const float* log, const int64_t* strides, int edge_axis,
                            float* out, int threads) {
  int last = axes - 1;
  int64_t width = sizes[last], rows = 1;
  for (int axis = 0; axis < last; ++axis) rows *= sizes[axis];
  int64_t rows_per_task = std::max<int64_t>((1 << 13) / std::max<int64_t>(width, 1), 1);
  parallel_for((rows + rows_per_task - 1) / rows_per_task, threads, [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < std::min(rows, (task + 1) * rows_per_task); ++row) {
      int64_t offset = 0, rest = row;
      bool outside = false;
      for (int axis = last - 1; axis >= 0; --axis) {
        int64_t index = rest % sizes[axis];
        rest /= sizes[axis];
        offset += index * strides[axis];
        outside = outside || (axis == edge_axis && index == 0);
      }
      float* to = out + row * width;
      if (outside) {
        std::fill_n(to, width, 0.0f);
      } else {
        exponentials(log + offset, strides[last], width, to);
        if (edge_axis == last) to[0] = 0.0f;
      }
    }
  });
  return 0;
}
