#include "product.h"

namespace ppma {

template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const Store&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScoreStore&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const ScaledStore&);
template void product(const Left&, const Right&, int64_t, int64_t, int64_t, const MixedStore&);

void pack_columns(const float* from, int64_t stride, int64_t rows, int64_t columns, float scale, float* to,
                  int64_t to_stride) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    int height = rows - row < kLanes ? static_cast<int>(rows - row) : kLanes;
    for (int64_t column = 0; column < columns; column += kLanes) {
      int width = columns - column < kLanes ? static_cast<int>(columns - column) : kLanes;
      Vec tile[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) {
        // What pads the rows is the last row times 0: no branch.
        const float* at = from + std::min(row + r, rows - 1) * stride + column;
        tile[r] = (width == kLanes ? load(at) : load_part(at, width)) * (r < height ? scale : 0.0f);
      }
      transpose(tile);
#pragma GCC unroll 16
      for (int c = 0; c < kLanes; ++c)
        if (c < width) store(to + (column + c) * to_stride + row, tile[c]);
    }
  }
}

}  // namespace ppma
