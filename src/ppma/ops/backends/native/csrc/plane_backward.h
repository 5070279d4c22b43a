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
  // What is scanned by columns, and where its states stand.
  static constexpr bool kHasX = mode != kH2V, kHasU = (mode & kH2V) != 0;
  static constexpr bool kHasG = mode != kV2H, kHasW = (mode & kV2H) != 0;
  static constexpr int kX = 0, kU = kX + kHasX, kG = kU + kHasU, kW = kG + kHasG;
  static constexpr int kStates = kW + kHasW;

  // Rows of a block whose states stay in cache.
  static int64_t block_rows(int64_t width, int64_t half_rows) {
    constexpr int64_t kBlockFloats = 1 << 20;
    return std::clamp<int64_t>(kBlockFloats / RowStack::floats(kStates, width), 1, half_rows);
  }

  // Scratch of one half from the walk inwards to the walk outwards.
  struct Kept {
    int64_t block_rows;
    RowStack middle;       // the states of the innermost row
    RowStack checkpoints;  // the states before each block
    RowStack forward;      // the states before the first row of a block and of each of its rows

    Kept(Arena& arena, int64_t width, int64_t half_rows, int64_t block_rows)
        : block_rows(block_rows),
          middle(arena, kStates, width),
          checkpoints(arena, kStates * ((half_rows + block_rows - 1) / block_rows), width),
          forward(arena, kStates * (block_rows + 1), width) {}
  };

  // Scratch of one thread.
  struct Space {
    Row in_x, in_g;
    float *chunks, *alpha_lanes, *beta_lanes;

    Space(Arena& arena, int64_t width)
        : in_x(RowStack(arena, 1, width)[0]),
          in_g(RowStack(arena, 1, width)[0]),
          chunks(arena.take(RowScan<std::max(kUp, 1)>::scratch_floats(width))),
          alpha_lanes(arena.take((width + kLanes) * kLanes)),
          beta_lanes(arena.take((width + kLanes) * kLanes)) {}
  };

  template <class SourceX, class SourceG>
  [[gnu::noinline]] static void inwards(const SourceX& x, const SourceG& g, const Half& half, const Kept& kept,
                                        const Space& space) {
    kept.forward.clear(kStates);
    for (int64_t r = 0; r < half.rows(); ++r) {
      int64_t k = r % kept.block_rows;
      if (k == 0) {
        if (r > 0) copy(kept.forward.from(kept.block_rows * kStates), kept.forward);
        copy(kept.forward, kept.checkpoints.from(r / kept.block_rows * kStates));
      }
      advance(x, g, half, r, kept.forward.from(k * kStates), space);
    }
    copy(innermost(half, kept), kept.middle);
  }

  // `other`: the middle states of the other half, overwritten. target(j, dx, y) receives the gradient of x and the
  // result of the scan itself between target.begin(i, row of x, row of g) and target.end(i).
  template <class SourceX, class SourceG, class Target>
  [[gnu::noinline]] static void outwards(const SourceX& x, const SourceG& g, Target& target, const EdgeGradients& grads,
                                         const Half& half, const Kept& kept, RowStack other, const Space& space) {
    if (!half.lower && half.edges.height > 1) {
      RowStack before = innermost(half, kept);
      for (int64_t j = 0; j < half.edges.width; ++j)
        store(space.beta_lanes + j * kLanes,
              by_column([&](int state) { return before[state](j); }, [&](int state) { return other[state](j); }));
      add_beta(grads, half.edges, half.rows(), space);
    }
    int64_t blocks = (half.rows() + kept.block_rows - 1) / kept.block_rows;
    for (int64_t block = blocks - 1; block >= 0; --block) {
      int64_t first = block * kept.block_rows, last = std::min(first + kept.block_rows, half.rows());
      if (block < blocks - 1) {
        copy(kept.checkpoints.from(block * kStates), kept.forward);
        for (int64_t r = first; r < last; ++r) advance(x, g, half, r, kept.forward.from((r - first) * kStates), space);
      }
      for (int64_t r = last - 1; r >= first; --r) {
        int64_t i = half.row(r);
        auto row_x = x.read(i, space.in_x);
        auto row_g = g.read(i, space.in_g);
        target.begin(i, row_x, row_g);
        meet(row_x, row_g, half, r, kept.forward.from((r - first) * kStates), other, space, target);
        target.end(i);
        if constexpr (kUp > 0)
          grads.add(grads.alpha + i * half.edges.row_stride, half.edges.along(i), space.alpha_lanes, half.edges.width);
        int64_t edge = half.lower ? i + 1 : i;
        if (edge < half.edges.height) add_beta(grads, half.edges, edge, space);
      }
    }
  }

 private:
  // What is scanned by rows on the way in: x for u, g for w; and on the way out with e and z.
  static constexpr int kDownX = 0, kDownG = kHasU, kDown = kHasU + kHasW;
  static constexpr int kUpX = 0, kUpE = kHasU, kUpG = 2 * kHasU, kUpZ = kUpG + kHasW, kUp = 2 * kDown;

  static void copy(RowStack from, RowStack to) {
    std::copy_n(from.data, RowStack::floats(kStates, from.width), to.data);
  }

  // The states of the innermost row, in the last block.
  static RowStack innermost(const Half& half, const Kept& kept) {
    int64_t in_block = half.rows() == 0 ? 0 : (half.rows() - 1) % kept.block_rows + 1;
    return kept.forward.from(in_block * kStates);
  }

  static void add_beta(const EdgeGradients& grads, const Edges& edges, int64_t i, const Space& space) {
    grads.add(grads.beta + i * edges.row_stride, edges.above(i), space.beta_lanes, edges.width);
  }

  // From the states of the row before r to those of row r, which stand after them.
  template <class SourceX, class SourceG>
  static void advance(const SourceX& source_x, const SourceG& source_g, const Half& half, int64_t r, RowStack states,
                      const Space& space) {
    int64_t i = half.row(r), next = half.row(std::min(r + 1, half.rows() - 1));
    auto x = source_x.read(i, space.in_x);
    auto g = source_g.read(i, space.in_g);
    const float* beta = half.outer(r);
    auto put = [&](int state, int64_t j, Vec value) PPMA_INLINE {
      states[kStates + state].put(j, beta[j] * states[state](j) + value);
    };
    auto values = [&](int64_t j, Vec* value) PPMA_INLINE {
      if constexpr (kHasU) value[kDownX] = x(j);
      if constexpr (kHasW) value[kDownG] = g(j);
    };
    auto finish = [&](int64_t j, const Scanned<std::max(kDown, 1)>& scanned) PPMA_INLINE {
      source_x.prefetch(next, j);
      source_g.prefetch(next, j);
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

  // One row on the way out: `forward` has the states before it and its own, `states` those of the row further in.
  template <class X, class G, class Target>
  static void meet(X x, G g, const Half& half, int64_t r, RowStack forward, RowStack states, const Space& space,
                   Target& target) {
    const float* beta = half.inner(r);
    auto sent = [&](int state, int64_t j) PPMA_INLINE { return beta[j] * states[state](j); };
    auto whole = [&](int state, int64_t j) PPMA_INLINE { return forward[kStates + state](j) + sent(state, j); };
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
      Vec column_products = by_column([&](int state) PPMA_INLINE { return forward[state](j); },
                                      [&](int state) PPMA_INLINE { return backward[state]; });
      unrolled<kStates>([&](auto state) PPMA_INLINE { states[state].put(j, backward[state]); });
      if constexpr (kUp > 0) store(space.alpha_lanes + j * kLanes, row_products);
      store(space.beta_lanes + j * kLanes, column_products);
      target(j, dx, y);
    };
    each_pixel<kUp>(half, half.row(r), space, values, finish);
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
