// Gradients of the scans of many planes, halves of which run on several threads: see halves.h.
#pragma once

#include "halves.h"
#include "plane_backward.h"

namespace ppma {

// A problem has planes(), height() and width() (of the widest plane), and for each plane sets() times members() scans.
// All scans of a plane add to the same gradients of its decays, so they follow one another, a group of members at a time:
//   edges(plane), edge_gradients(plane)
//   group(plane, set, first, members, space)   as PlaneBackward expects it, with a space of type GroupSpace
template <int mode, class Problem>
struct BackwardJob {
  using Backward = PlaneBackward<mode>;
  using GroupSpace = typename Problem::GroupSpace;
  const Problem& problem;
  typename Backward::Plan plan{problem.width(), (problem.height() + 1) / 2, problem.members()};
  int64_t groups = (problem.members() + plan.group - 1) / plan.group;
  int64_t units = problem.planes(), tiles = problem.sets() * groups;
  int64_t half_floats = floats_of<typename Backward::Kept>(plan);
  int64_t shared_floats = 2 * half_floats;
  int64_t own_floats = floats_of<typename Backward::Space>(plan.width) + floats_of<GroupSpace>(plan.width);

  void inwards(int64_t plane, int64_t tile, bool lower, float* shared, float* own) const {
    walk(plane, tile, lower, shared, own, [](auto& group, auto& half, auto& here, auto&, auto& space) {
      Backward::inwards(group, half, here, space);
    });
  }

  void outwards(int64_t plane, int64_t tile, bool lower, float* shared, float* own) const {
    EdgeGradients gradients = problem.edge_gradients(plane);
    walk(plane, tile, lower, shared, own, [&](auto& group, auto& half, auto& here, auto& there, auto& space) {
      Backward::outwards(group, gradients, half, here, there.middle, space);
    });
  }

 private:
  template <class Body>
  void walk(int64_t plane, int64_t tile, bool lower, float* shared, float* own, Body body) const {
    Half half{lower, problem.edges(plane)};
    typename Backward::Plan narrow = plan;
    narrow.width = half.edges.width;
    Arena upper_half(shared), lower_half(shared + half_floats), of_thread(own);
    typename Backward::Kept here(lower ? lower_half : upper_half, narrow);
    typename Backward::Kept there(lower ? upper_half : lower_half, narrow);
    typename Backward::Space space(of_thread, narrow.width);
    int64_t first = tile % groups * plan.group;
    auto group = problem.group(plane, tile / groups, first, std::min(plan.group, problem.members() - first),
                               GroupSpace(of_thread, narrow.width));
    body(group, half, here, there, space);
  }
};

}  // namespace ppma
