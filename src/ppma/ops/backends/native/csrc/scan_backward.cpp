// Gradients of the bidirectional decay scans.
#include "backward_job.h"
#include "scan_geometry.h"
#include "view.h"

using namespace ppma;

namespace {

// Mirrors `ScanGradients` of scan.py: the gradient of the result, and those of the inputs. Those of the
// log-decays are laid out as the decays and added to; without row scans alpha is not touched.
struct ScanGradients {
  PlaneTensor out, x, alpha, beta;
};

// Where the gradient of x goes.
struct GradientTarget {
  ChannelPlane plane;
  Row spare;
  bool add;
  Row row;

  void begin(int64_t i, Row, Row) { row = plane.writable(i, spare, add); }
  PPMA_INLINE void operator()(int64_t j, Vec dx, Vec) const { row.put(j, add ? row(j) + dx : dx); }
  void end(int64_t i) const { plane.write_back(i, spare); }
};

// Some vectors of channels of a plane.
struct Group {
  const Geometry& geometry;
  const ScanGradients& grads;
  int64_t plane, first, members;
  Row spare;

  ChannelPlane vector(const PlaneTensor& tensor, int64_t member) const {
    return geometry.channels(tensor, plane, first + member);
  }
  ChannelPlane x(int64_t member) const { return vector(geometry.params.x, member); }
  ChannelPlane g(int64_t member) const { return vector(grads.out, member); }
  GradientTarget target(int64_t member) const {
    return {vector(grads.x, member), spare, geometry.params.add != 0, {}};
  }
};

struct ScanGradientProblem {
  Geometry geometry;
  const ScanGradients& grads;

  struct GroupSpace {
    Row spare;

    GroupSpace(Arena& arena, int64_t width) : spare(take_row(arena, width)) {}
  };

  int64_t planes() const { return geometry.planes(); }
  int64_t height() const { return geometry.height(); }
  int64_t width() const { return geometry.chunk; }
  int64_t sets() const { return 1; }
  int64_t members() const { return geometry.vectors(); }
  Edges edges(int64_t plane) const { return geometry.edges(plane); }
  EdgeGradients edge_gradients(int64_t plane) const {
    return {geometry.at(grads.alpha, plane, 1), geometry.at(grads.beta, plane, 1)};
  }
  Group group(int64_t plane, int64_t, int64_t first, int64_t members, const GroupSpace& space) const {
    return {geometry, grads, plane, first, members, space.spare};
  }
};

}  // namespace

PPMA_EXPORT int ppma_polyline_scan_backward(const ScanParams* params, const ScanGradients* grads) {
  ScanGradientProblem gradient_problem{Geometry(*params), *grads};
  return with_mode<kColumns, kV2H, kH2V, kBoth>(params->mode, [&](auto mode) {
    return run_halves(BackwardJob<mode, ScanGradientProblem>{gradient_problem}, static_cast<int>(params->threads));
  });
}
