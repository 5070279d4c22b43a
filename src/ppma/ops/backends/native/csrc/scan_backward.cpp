// Gradients of the bidirectional decay scans.
#include "halves.h"
#include "plane_backward.h"
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

template <int mode>
struct ScanBackwardJob {
  using Backward = PlaneBackward<mode>;
  Geometry geometry;
  const ScanGradients& grads;
  int64_t units = geometry.planes(), tiles = geometry.vectors();
  int64_t half_rows = (geometry.height() + 1) / 2;
  int64_t block_rows = Backward::block_rows(geometry.chunk, half_rows);
  int64_t half_floats = floats_of<typename Backward::Kept>(geometry.chunk, half_rows, block_rows);
  int64_t shared_floats = 2 * half_floats;
  int64_t own_floats = floats_of<typename Backward::Space>(geometry.chunk) + RowStack::floats(1, geometry.chunk);

  // The walks of one half of a plane.
  struct Walk {
    Half half;
    Arena own, kept_here, kept_there;
    typename Backward::Space space;
    typename Backward::Kept here, there;

    Walk(const ScanBackwardJob& job, int64_t plane, bool lower, float* shared, float* own)
        : half{lower, job.geometry.edges(plane)},
          own(own),
          kept_here(shared + lower * job.half_floats),
          kept_there(shared + !lower * job.half_floats),
          space(this->own, half.edges.width),
          here(kept_here, half.edges.width, job.half_rows, job.block_rows),
          there(kept_there, half.edges.width, job.half_rows, job.block_rows) {}
  };

  void inwards(int64_t plane, int64_t vector, bool lower, float* shared, float* own) const {
    Walk walk(*this, plane, lower, shared, own);
    Backward::inwards(geometry.channels(geometry.problem.x, plane, vector), geometry.channels(grads.out, plane, vector), walk.half, walk.here,
                      walk.space);
  }

  void outwards(int64_t plane, int64_t vector, bool lower, float* shared, float* own) const {
    Walk walk(*this, plane, lower, shared, own);
    Row spare = RowStack(walk.own, 1, walk.half.edges.width)[0];
    GradientTarget target{geometry.channels(grads.x, plane, vector), spare, geometry.problem.add != 0, {}};
    EdgeGradients edge_grads{geometry.at(grads.alpha, plane, 1), geometry.at(grads.beta, plane, 1)};
    Backward::outwards(geometry.channels(geometry.problem.x, plane, vector), geometry.channels(grads.out, plane, vector), target, edge_grads,
                       walk.half, walk.here, walk.there.middle, walk.space);
  }
};

}  // namespace

PPMA_EXPORT int ppma_scan_backward(const ScanProblem* problem, const ScanGradients* grads) {
  return with_mode(problem->mode, [&](auto mode) {
    return run_halves(ScanBackwardJob<mode>{Geometry(*problem), *grads}, static_cast<int>(problem->threads));
  });
}
