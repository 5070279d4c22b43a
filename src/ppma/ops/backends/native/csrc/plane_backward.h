// Gradients of the scans of plane_scan.h.
//
// With x the input, g the gradient of the result, u = R x, w = R g, z = K x, e = K g, and A(p, q) the gradient of the
// log-decays of a line in p^T (line matrix) q, which is symmetric in p and q and needs no logarithm and no division:
//
//     A(p, q)[m] = decay[m] (f_p[m-1] r_q[m] + f_q[m-1] r_p[m])      f, r: forward and backward recurrence
//     V2H:  dx = K w,  d beta = A(x, w) by columns,  d alpha = A(z, g) by rows
//     H2V:  dx = R e,  d beta = A(u, g) by columns,  d alpha = A(x, e) by rows
//
// both summed over the channels. The walk inwards computes f of every column and keeps it for the last block of rows
// only, with checkpoints where the others begin; the walk outwards meets it with r, block by block.
#pragma once

#include <cmath>

#include "lane_sums.h"
#include "plane_scan.h"

namespace ppma {

// Gradients of the log-decays of a plane, laid out as its edges, to be added to.
struct EdgeGradients {
  float* alpha;
  float* beta;

  // grad[j] += decay[j] * the sum of the lanes of pixel j. Reads `lanes` up to a multiple of kLanes pixels.
  void add(float* grad, const float* decay, const float* lanes, int64_t width) const {
    for (int64_t j = 0; j < width; j += kLanes) {
      int count = static_cast<int>(std::min<int64_t>(kLanes, width - j));
      Vec sums = sum_each(lanes + j * kLanes) * load_part(decay + j, count);
      store_part(grad + j, load_part(grad + j, count) + sums, count);
    }
  }
};

template <int mode>
class PlaneBackward {
 public:
  // The quantities scanned by columns, and the indices of their states.
  static constexpr bool kHasX = mode != kH2V, kHasU = (mode & kH2V) != 0;
  static constexpr bool kHasG = mode != kV2H, kHasW = (mode & kV2H) != 0;
  static constexpr int kX = 0, kU = kX + kHasX, kG = kU + kHasU, kW = kG + kHasG;
  static constexpr int kStates = kW + kHasW;

  using States = StateRow<kStates>;

  // How the states of `width` columns are kept: of so many members of a group together, for blocks of so many rows.
  struct Plan {
    int64_t width, half_rows, group, block_rows;

    Plan(int64_t width, int64_t half_rows, int64_t members) : width(width), half_rows(half_rows) {
      constexpr int64_t kRowFloats = 1 << 16, kBlockFloats = 1 << 20;
      int64_t member_floats = States::floats(width);
      group = std::clamp<int64_t>(kRowFloats / member_floats, 1, std::min(kMostMembers, members));
      // A block that stays in cache; on huge grids the root of the rows, which takes the least memory.
      int64_t rows = std::max(kBlockFloats / (group * member_floats), static_cast<int64_t>(std::sqrt(half_rows)));
      block_rows = std::clamp<int64_t>(rows, 1, half_rows);
    }
  };

  // Scratch of one half from the walk inwards to the walk outwards, in rows of the states of all members of a group.
  struct Kept {
    int64_t member_floats, row_floats, block_rows;
    float* middle;       // the states of the innermost row
    float* checkpoints;  // the states before each block
    float* forward;      // the states before the first row of a block and of each of its rows

    Kept(Arena& arena, const Plan& plan)
        : member_floats(States::floats(plan.width)),
          row_floats(plan.group * member_floats),
          block_rows(plan.block_rows),
          middle(arena.take(row_floats)),
          checkpoints(arena.take(row_floats * ((plan.half_rows + block_rows - 1) / block_rows))),
          forward(arena.take(row_floats * (block_rows + 1))) {}

    // The states after k rows of the block.
    float* after(int64_t k) const { return forward + k * row_floats; }
    float* checkpoint(int64_t block) const { return checkpoints + block * row_floats; }

    // The states of the innermost row, in the last block.
    float* innermost(const Half& half) const {
      return after(half.rows() == 0 ? 0 : (half.rows() - 1) % block_rows + 1);
    }

    void copy(const float* from, float* to) const { std::copy_n(from, row_floats, to); }
    States of(float* row, int64_t member) const { return {row + member * member_floats}; }
  };

  // Scratch of one thread.
  struct Space {
    Row in_x, in_g;
    float *chunks, *alpha_lanes, *beta_lanes;

    Space(Arena& arena, int64_t width)
        : in_x(take_row(arena, width)),
          in_g(take_row(arena, width)),
          chunks(arena.take(RowScan<std::max(kUp, 1)>::scratch_floats(width))),
          alpha_lanes(arena.take((width + kLanes) * kLanes)),
          beta_lanes(arena.take((width + kLanes) * kLanes)) {}
  };

  // A group has `members` and for each of them sources x(member), g(member), rows of which can be read, and a
  // target(member).
  template <class Group>
  [[gnu::noinline]] static void inwards(const Group& group, const Half& half, const Kept& kept, const Space& space) {
    std::fill_n(kept.after(0), kept.row_floats, 0.0f);
    for (int64_t r = 0; r < half.rows(); ++r) {
      int64_t k = r % kept.block_rows;
      if (k == 0) {
        if (r > 0) kept.copy(kept.after(kept.block_rows), kept.after(0));
        kept.copy(kept.after(0), kept.checkpoint(r / kept.block_rows));
      }
      advance(group, half, r, kept, k, space);
    }
    kept.copy(kept.innermost(half), kept.middle);
  }

  // `other`: the middle states of the other half, overwritten. A target receives (j, dx, y), the gradient of x and the
  // result of the scan itself, between begin(i, row of x, row of g) and end(i).
  template <class Group>
  [[gnu::noinline]] static void outwards(const Group& group, const EdgeGradients& grads, const Half& half,
                                         const Kept& kept, float* other, const Space& space) {
    if (!half.lower && half.edges.height > 1) middle_edges(group, grads, half, kept, other, space);
    int64_t blocks = (half.rows() + kept.block_rows - 1) / kept.block_rows;
    for (int64_t block = blocks - 1; block >= 0; --block) {
      int64_t first = block * kept.block_rows, last = std::min(first + kept.block_rows, half.rows());
      if (block < blocks - 1) {
        kept.copy(kept.checkpoint(block), kept.after(0));
        for (int64_t k = 0; k < last - first; ++k) advance(group, half, first + k, kept, k, space);
      }
      for (int64_t k = last - first - 1; k >= 0; --k)
        for (int64_t member = 0; member < group.members; ++member)
          meet(group, member, grads, half, first + k, kept.of(kept.after(k), member),
               kept.of(kept.after(k + 1), member), kept.of(other, member), space);
    }
  }

 private:
  static constexpr int64_t kMostMembers = 4;
  // What is scanned by rows on the way in: x for u, g for w; and on the way out with e and z.
  static constexpr int kDownX = 0, kDownG = kHasU, kDown = kHasU + kHasW;
  static constexpr int kUpX = 0, kUpE = kHasU, kUpG = 2 * kHasU, kUpZ = kUpG + kHasW, kUp = 2 * kDown;

  static void add_beta(const EdgeGradients& grads, const Edges& edges, int64_t i, const Space& space) {
    grads.add(grads.beta + i * edges.row_stride, edges.above(i), space.beta_lanes, edges.width);
  }

  // The edges between the halves.
  template <class Group>
  static void middle_edges(const Group& group, const EdgeGradients& grads, const Half& half, const Kept& kept,
                           float* other, const Space& space) {
    for (int64_t member = 0; member < group.members; ++member) {
      States above = kept.of(kept.innermost(half), member), below = kept.of(other, member);
      for (int64_t j = 0; j < half.edges.width; ++j)
        store(space.beta_lanes + j * kLanes,
              by_column([&](int state) { return above(state, j); }, [&](int state) { return below(state, j); }));
      add_beta(grads, half.edges, half.rows(), space);
    }
  }

  // From the states before row r, row k of the block, to those of row r.
  template <class Group>
  static void advance(const Group& group, const Half& half, int64_t r, const Kept& kept, int64_t k,
                      const Space& space) {
    for (int64_t member = 0; member < group.members; ++member)
      advance(group.x(member), group.g(member), half, r, kept.of(kept.after(k), member),
              kept.of(kept.after(k + 1), member), space);
  }

  template <class SourceX, class SourceG>
  static void advance(const SourceX& source_x, const SourceG& source_g, const Half& half, int64_t r, States before,
                      States after, const Space& space) {
    int64_t i = half.row(r), next = half.row(std::min(r + 1, half.rows() - 1));
    auto x = source_x.read(i, space.in_x), next_x = source_x.in_memory(next);
    auto g = source_g.read(i, space.in_g), next_g = source_g.in_memory(next);
    const float* beta = half.outer(r);
    auto put = [&](int state, int64_t j, Vec value) PPMA_INLINE {
      after.put(state, j, beta[j] * before(state, j) + value);
    };
    auto values = [&](int64_t j, Vec* value) PPMA_INLINE {
      if constexpr (kHasU) value[kDownX] = x(j);
      if constexpr (kHasW) value[kDownG] = g(j);
    };
    auto finish = [&](int64_t j, const Scanned<std::max(kDown, 1)>& scanned) PPMA_INLINE {
      next_x.prefetch(j);
      next_g.prefetch(j);
      if constexpr (kHasX) put(kX, j, x(j));
      if constexpr (kHasG) put(kG, j, g(j));
      if constexpr (kHasU) put(kU, j, scanned.result(kDownX));
      if constexpr (kHasW) put(kW, j, scanned.result(kDownG));
    };
    each_pixel<kDown>(half, i, space, values, finish);
  }

  // The products of A(p, q) by columns, from the forward states of a row and the backward states of the next.
  template <class Forward, class Backward>
  PPMA_INLINE static Vec by_column(Forward forward, Backward backward) {
    Vec total{};
    if constexpr (mode == kColumns) total = forward(kX) * backward(kG) + forward(kG) * backward(kX);
    if constexpr (kHasW) total += forward(kX) * backward(kW) + forward(kW) * backward(kX);
    if constexpr (kHasU) total += forward(kU) * backward(kG) + forward(kG) * backward(kU);
    return total;
  }

  // One row on the way out: `before` and `here` have the forward states of the row further out and of this one, `states`
  // the backward states of the row further in, which become those of this one.
  template <class Group>
  static void meet(const Group& group, int64_t member, const EdgeGradients& grads, const Half& half, int64_t r,
                   States before, States here, States states, const Space& space) {
    int64_t i = half.row(r);
    auto x = group.x(member).read(i, space.in_x);
    auto g = group.g(member).read(i, space.in_g);
    auto target = group.target(member);
    target.begin(i, x, g);
    const float* beta = half.inner(r);
    auto sent = [&](int state, int64_t j) PPMA_INLINE { return beta[j] * states(state, j); };
    auto whole = [&](int state, int64_t j) PPMA_INLINE { return here(state, j) + sent(state, j); };
    auto values = [&](int64_t j, Vec* value) PPMA_INLINE {
      if constexpr (kHasU) {
        value[kUpX] = x(j);
        value[kUpE] = whole(kG, j);
      }
      if constexpr (kHasW) {
        value[kUpG] = g(j);
        value[kUpZ] = whole(kX, j);
      }
    };
    auto finish = [&](int64_t j, const Scanned<std::max(kUp, 1)>& scanned) PPMA_INLINE {
      // The products of A(p, q) by rows, with the places of p and q in the row scan.
      auto by_row = [&](int p, int q) PPMA_INLINE {
        return scanned.left_before[p] * (scanned.value[q] + scanned.right[q]) +
               scanned.left_before[q] * (scanned.value[p] + scanned.right[p]);
      };
      Vec dx{}, y{}, row_products{}, backward[kStates];
      if constexpr (kHasX) backward[kX] = sent(kX, j) + x(j);
      if constexpr (kHasG) backward[kG] = sent(kG, j) + g(j);
      if constexpr (mode == kColumns) dx = whole(kG, j);
      if constexpr (kHasU) {
        backward[kU] = sent(kU, j) + scanned.result(kUpX);
        dx += scanned.result(kUpE);
        y += whole(kU, j);
        row_products += by_row(kUpX, kUpE);
      }
      if constexpr (kHasW) {
        backward[kW] = sent(kW, j) + scanned.result(kUpG);
        dx += whole(kW, j);
        y += scanned.result(kUpZ);
        row_products += by_row(kUpG, kUpZ);
      }
      Vec column_products = by_column([&](int state) PPMA_INLINE { return before(state, j); },
                                      [&](int state) PPMA_INLINE { return backward[state]; });
      unrolled<kStates>([&](auto state) PPMA_INLINE { states.put(state, j, backward[state]); });
      if constexpr (kUp > 0) store(space.alpha_lanes + j * kLanes, row_products);
      store(space.beta_lanes + j * kLanes, column_products);
      target(j, dx, y);
    };
    each_pixel<kUp>(half, i, space, values, finish);
    target.end(i);
    if constexpr (kUp > 0)
      grads.add(grads.alpha + i * half.edges.row_stride, half.edges.along(i), space.alpha_lanes, half.edges.width);
    int64_t edge = half.lower ? i + 1 : i;
    if (edge < half.edges.height) add_beta(grads, half.edges, edge, space);
  }

  template <int N, class Values, class Finish>
  PPMA_INLINE static void each_pixel(const Half& half, int64_t i, const Space& space, Values values, Finish finish) {
    if constexpr (N > 0) {
      RowScan<N>::run(half.edges.along(i), half.edges.width, space.chunks, values, finish);
    } else {
      for (int64_t j = 0; j < half.edges.width; ++j) finish(j, {});
    }
  }
};

}  // namespace ppma
