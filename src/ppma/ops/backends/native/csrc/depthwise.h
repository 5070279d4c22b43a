// Depthwise convolutions whose taps were packed in advance.
#pragma once

#include "view.h"

namespace ppma {

// `taps` are [tap or bias][channel], kernel * kernel taps, with the channels in whole cache lines. `base` is null for none: what
// else is added to the sum is in the taps. The rest as ppma_depthwise_conv.
int packed_depthwise(const View& x, const float* taps, const View* base, const View& out, const int64_t* sizes,
                     int64_t kernel, bool with_gelu, int threads);

}  // namespace ppma
