// Gradients of linear and decomposed attention: with x = K outer V and g = Q outer (gradient of the output), the gradients
// of the scan of x give those of k, v and the decays, and its result, contracted with the gradient, that of q.
#include "backward_job.h"
#include "linear_params.h"

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

// Scratch of one thread.
struct TargetSpace {
  Row spare;
  float *q_lanes, *k_lanes;

  TargetSpace(Arena& arena, int64_t width)
      : spare(take_row(arena, width)),
        q_lanes(arena.take((width + kLanes) * kLanes)),
        k_lanes(arena.take((width + kLanes) * kLanes)) {}
};

// Some features of q and k with one vector of v.
struct Group {
  LinearPlane plane;
  const LinearGradients& grads;
  int64_t vector, first, members;
  TargetSpace space;

  OuterPlane outer(const View& scalars, const View& vectors, int64_t member) const {
    return {plane.channel(scalars, first + member), plane.vector(vectors, vector, plane.params.dv)};
  }
  OuterPlane x(int64_t member) const { return outer(plane.params.k, plane.params.v, member); }
  OuterPlane g(int64_t member) const { return outer(plane.params.q, grads.out, member); }
  Target target(int64_t member) const {
    int64_t feature = first + member;
    return {plane.channel(grads.q, feature), plane.channel(grads.k, feature),
            plane.vector(grads.v, vector, plane.params.dv), space.spare, space.q_lanes, space.k_lanes, vector > 0,
            feature > 0};
  }
};

struct LinearGradientProblem {
  const LinearParams& params;
  const LinearGradients& grads;

  using GroupSpace = TargetSpace;

  int64_t planes() const { return params.batch * params.heads; }
  int64_t height() const { return params.height; }
  int64_t width() const { return params.width; }
  int64_t sets() const { return (params.dv + kLanes - 1) / kLanes; }
  int64_t members() const { return params.d; }
  Edges edges(int64_t plane) const { return LinearPlane(params, plane).edges(); }
  EdgeGradients edge_gradients(int64_t plane) const {
    int64_t offset = LinearPlane(params, plane).offset();
    return {grads.log_alpha + offset, grads.log_beta + offset};
  }
  Group group(int64_t plane, int64_t vector, int64_t first, int64_t members, const TargetSpace& space) const {
    return {LinearPlane(params, plane), grads, vector, first, members, space};
  }
};

}  // namespace

PPMA_EXPORT int ppma_linear_attention_backward(const LinearParams* params, const LinearGradients* grads) {
  LinearGradientProblem gradient_problem{*params, *grads};
  return with_mode<kV2H, kH2V, kBoth>(params->mode, [&](auto mode) {
    return run_halves(BackwardJob<mode, LinearGradientProblem>{gradient_problem}, static_cast<int>(params->threads));
  });
}
