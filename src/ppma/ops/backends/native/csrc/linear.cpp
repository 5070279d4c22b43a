// Linear and decomposed attention with the mask (Theorem 3): q . (L (K outer V)), contracted where it is scanned.
//
// The scan of K outer V runs over a few features of k and one vector of v at a time; what exists of it is a row of column
// states for each of them.
#include "halves.h"
#include "linear_params.h"

using namespace ppma;

namespace {

// Column states of a group of features that stay in the second-level cache.
constexpr int64_t kStateBytes = 512 << 10;
constexpr int64_t kMostFeatures = 16;

template <int mode>
struct LinearJob {
  using Scan = PlaneScan<mode>;
  const LinearParams& params;
  const View& out;
  int64_t vectors = (params.dv + kLanes - 1) / kLanes;
  int64_t group = std::clamp<int64_t>(
      kStateBytes / int64_t(StateRow<Scan::kStates>::floats(params.width) * sizeof(float)), 1,
      std::min(kMostFeatures, params.d));
  int64_t units = params.batch * params.heads * vectors;
  int64_t tiles = (params.d + group - 1) / group;
  int64_t half_floats = group * StateRow<Scan::kStates>::floats(params.width);
  int64_t shared_floats = 2 * half_floats;
  int64_t own_floats = floats_of<typename Scan::Space>(params.width);

  void inwards(int64_t unit, int64_t tile, bool lower, float* shared, float* own) const {
    float* states = shared + lower * half_floats;
    std::fill_n(states, half_floats, 0.0f);
    walk<true>(unit, tile, lower, states, own);
  }

  void outwards(int64_t unit, int64_t tile, bool lower, float* shared, float* own) const {
    walk<false>(unit, tile, lower, shared + !lower * half_floats, own);
  }

  // Never inlined: two copies might be compiled to different roundings.
  template <bool inwards>
  [[gnu::noinline]] void walk(int64_t unit, int64_t tile, bool lower, float* states, float* own) const {
    LinearPlane plane(params, unit / vectors);
    int64_t vector = unit % vectors, first = tile * group, last = std::min(first + group, params.d);
    ChannelPlane values = plane.vector(params.v, vector, params.dv), results = plane.vector(out, vector, params.dv);
    Half half{lower, plane.edges()};
    Arena arena(own);
    typename Scan::Space space(arena, params.width);
    for (int64_t done = 0; done < half.rows(); ++done) {
      int64_t r = inwards ? done : half.rows() - 1 - done;
      int64_t i = half.row(r);
      bool add = !inwards || tile > 0;
      Row v = values.read(i, space.in), y = results.writable(i, space.out, add);
      for (int64_t feature = first; feature < last; ++feature, add = true) {
        ScalarPlane k = plane.channel(params.k, feature), q = plane.channel(params.q, feature);
        OuterRow x{k.row(i), k.pixel_stride, v};
        const float* queries = q.row(i);
        StateRow<Scan::kStates> row_states{states + (feature - first) * StateRow<Scan::kStates>::floats(params.width)};
        Scan::template step<inwards>(x, half.edges.along(i), inwards ? half.outer(r) : half.inner(r), params.width,
                                     row_states, space, [&](int64_t j, Vec value) PPMA_INLINE {
                                       Vec product = queries[j * q.pixel_stride] * value;
                                       y.put(j, add ? product + y(j) : product);
                                     });
      }
      results.write_back(i, space.out);
    }
  }
};

}  // namespace

PPMA_EXPORT int ppma_linear_attention(const LinearParams* params, const View* out) {
  return with_mode<kV2H, kH2V, kBoth>(params->mode, [&](auto mode) {
    return run_halves(LinearJob<mode>{*params, *out}, static_cast<int>(params->threads));
  });
}
