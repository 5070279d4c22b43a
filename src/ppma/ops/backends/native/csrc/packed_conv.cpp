// Convolutions as packed products: in a channel-last image with a border of zeros, the inputs of an output pixel are three
// runs of memory, one for each row of the kernel, and those of the next pixel lie a fixed distance further.
//
// A task is a band of rows of one image and some panels of outputs; it copies its rows with their border first. Every output
// is summed in the same order whatever the bands, so the bits do not depend on the number of threads.
#include "packed_conv.h"

#include <algorithm>

#include "bordered_rows.h"
#include "packed_tile.h"
#include "parallel.h"

using namespace ppma;

namespace {

constexpr int64_t kBandFloats = 64 << 10;  // of the copied rows, which share the second-level cache with the weights
constexpr int64_t kTasksPerThread = 4;

struct Geometry {
  int64_t out_height, out_width;
  int64_t row_floats;  // of a copied row
  int64_t band;        // output rows of a task
  int64_t groups;      // of panels

  explicit Geometry(const PackedConvParams& params)
      : out_height(params.out_height()),
        out_width(params.out_width()),
        row_floats((params.width + 2) * params.inputs) {
    int64_t fitting = std::max<int64_t>(1, (kBandFloats / row_floats - 2) / params.stride);
    int64_t wanted = kTasksPerThread * params.threads;
    // More bands than fit only if there are too few tasks; a narrow band copies its border rows again and again.
    band = std::min(fitting, std::max<int64_t>(4, params.batch * out_height / wanted));
    band = std::min(band, out_height);
    groups = std::clamp<int64_t>(wanted / std::max<int64_t>(1, params.batch * bands()), 1, panels_of(params.outputs));
    if (params.threads == 1) groups = 1;
  }
  int64_t bands() const { return (out_height + band - 1) / band; }
};

}  // namespace

PPMA_EXPORT int ppma_packed_conv(const PackedConvParams* given) {
  const PackedConvParams& params = *given;
  const Geometry geometry(params);
  const int64_t panels = panels_of(params.outputs), inputs = 9 * params.inputs, step = params.stride * params.inputs;
  std::atomic<bool> failed{false};
  parallel_for(params.batch * geometry.bands() * geometry.groups, params.threads, [&](int64_t task) {
    int64_t group = task % geometry.groups, rest = task / geometry.groups;
    int64_t image = rest / geometry.bands(), begin = rest % geometry.bands() * geometry.band;
    int64_t end = std::min(geometry.out_height, begin + geometry.band);
    int64_t rows = (end - begin - 1) * params.stride + 3;
    float* copied = Scratch::floats(rows * geometry.row_floats);
    if (!copied) {
      failed = true;
      return;
    }
    copy_bordered(params.x, image, params.height, params.width, params.inputs, begin * params.stride - 1, rows,
                  geometry.row_floats, copied);
    for (int64_t panel = panels * group / geometry.groups; panel < panels * (group + 1) / geometry.groups; ++panel) {
      int64_t column = panel * kPanel;
      for (int64_t y = begin; y < end; ++y) {
        const float* row = copied + (y - begin) * params.stride * geometry.row_floats;
        float* out = params.out + ((image * geometry.out_height + y) * geometry.out_width) * params.outputs + column;
        PanelProduct product{};
        product.x = row;
        product.x_stride = step;
        product.segments = 3;
        product.segment_stride = geometry.row_floats;
        product.depth = product.last_depth = 3 * params.inputs;
        product.weights = params.packed + column * inputs;
        product.bias = params.bias + column;
        product.out = out;
        product.out_stride = params.outputs;
        product.gelu = params.gelu;
        run_panel(product, geometry.out_width, params.outputs - column);
      }
    }
  });
  return failed;
}
