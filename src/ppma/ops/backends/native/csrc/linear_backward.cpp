// Gradients of linear and decomposed attention: with x = K outer V and g = Q outer (gradient of the output), the gradients
// of the scan of x give those of k, v and the decays, and its result, contracted with the gradient, that of q.
#include "halves.h"
#include "linear_problem.h"
#include "plane_backward.h"

using namespace ppma;

namespace {

// Mirrors `LinearGradients` of linear.py: the gradient of the output, and those of the inputs. Those of the
// log-decays are laid out as the decays and added to.
struct LinearGradients {
  View out, q, k, v;
  float *log_alpha, *log_beta;
};

// A row of the gradients of one feature of q and k and one vector of v.
struct Target {
  ScalarPlane grad_q, grad_k;
  ChannelPlane grad_v;
  Row spare;
  float *q_lanes, *k_lanes;
  bool add_qk, add_v;
  Row row_v{};
  OuterRow x{}, g{};

  void begin(int64_t i, const OuterRow& row_x, const OuterRow& row_g) {
    x = row_x;
    g = row_g;
    row_v = grad_v.writable(i, spare, add_v);
  }

  PPMA_INLINE void operator()(int64_t j, Vec dx, Vec y) const {
    store(q_lanes + j * kLanes, y * g.vectors(j));
    store(k_lanes + j * kLanes, dx * x.vectors(j));
    Vec product = x.scalar(j) * dx;
    row_v.put(j, add_v ? product + row_v(j) : product);
  }

  void end(int64_t i) const {
    grad_v.write_back(i, spare);
    put(grad_q, i, q_lanes);
    put(grad_k, i, k_lanes);
  }

  void put(const ScalarPlane& grad, int64_t i, const float* lanes) const {
    float* row = grad.row(i);
    for (int64_t j = 0; j < grad_v.width; j += kLanes) {
      Vec sums = sum_each(lanes + j * kLanes);
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, grad_v.width - j); ++lane) {
        float& at = row[(j + lane) * grad.pixel_stride];
        at = add_qk ? at + sums[lane] : sums[lane];
      }
    }
  }
};

template <int mode>
struct LinearBackwardJob {
  using Backward = PlaneBackward<mode>;
  const LinearProblem& problem;
  const LinearGradients& grads;
  int64_t units = problem.batch * problem.heads;
  int64_t tiles = (problem.dv + kLanes - 1) / kLanes * problem.d;
  int64_t half_rows = (problem.height + 1) / 2;
  int64_t block_rows = Backward::block_rows(problem.width, half_rows);
  int64_t half_floats = floats_of<typename Backward::Kept>(problem.width, half_rows, block_rows);
  int64_t shared_floats = 2 * half_floats;
  int64_t own_floats = floats_of<typename Backward::Space>(problem.width) + floats_of<Lanes>(problem.width);

  // Scratch of one thread for the target.
  struct Lanes {
    Row spare;
    float *q, *k;

    Lanes(Arena& arena, int64_t width)
        : spare(RowStack(arena, 1, width)[0]),
          q(arena.take((width + kLanes) * kLanes)),
          k(arena.take((width + kLanes) * kLanes)) {}
  };

  void inwards(int64_t unit, int64_t tile, bool lower, float* shared, float* own) const {
    walk(unit, tile, lower, shared, own, [](auto& x, auto& g, auto& half, auto& here, auto&, auto& space, auto&, auto&) {
      Backward::inwards(x, g, half, here, space);
    });
  }

  void outwards(int64_t unit, int64_t tile, bool lower, float* shared, float* own) const {
    walk(unit, tile, lower, shared, own,
         [](auto& x, auto& g, auto& half, auto& here, auto& there, auto& space, auto& target, auto& edge_grads) {
           Backward::outwards(x, g, target, edge_grads, half, here, there.middle, space);
         });
  }

  template <class Body>
  void walk(int64_t unit, int64_t tile, bool lower, float* shared, float* own, Body body) const {
    LinearPlane plane(problem, unit);
    int64_t vector = tile / problem.d, feature = tile % problem.d;
    OuterPlane x{plane.channel(problem.k, feature), plane.vector(problem.v, vector, problem.dv)};
    OuterPlane g{plane.channel(problem.q, feature), plane.vector(grads.out, vector, problem.dv)};
    Half half{lower, plane.edges()};
    Arena upper_half(shared), lower_half(shared + half_floats), of_thread(own);
    typename Backward::Kept here(lower ? lower_half : upper_half, problem.width, half_rows, block_rows);
    typename Backward::Kept there(lower ? upper_half : lower_half, problem.width, half_rows, block_rows);
    typename Backward::Space space(of_thread, problem.width);
    Lanes lanes(of_thread, problem.width);
    Target target{plane.channel(grads.q, feature), plane.channel(grads.k, feature),
                  plane.vector(grads.v, vector, problem.dv), lanes.spare, lanes.q, lanes.k, vector > 0, feature > 0};
    EdgeGradients edge_grads{grads.log_alpha + plane.offset(), grads.log_beta + plane.offset()};
    body(x, g, half, here, there, space, target, edge_grads);
  }
};

}  // namespace

PPMA_EXPORT int ppma_linear_backward(const LinearProblem* problem, const LinearGradients* grads) {
  return with_mode(problem->mode, [&](auto mode) {
    return run_halves(LinearBackwardJob<mode>{*problem, *grads}, static_cast<int>(problem->threads));
  });
}
