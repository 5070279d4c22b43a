// Bidirectional decay scans.
#include "halves.h"
#include "scan_geometry.h"
#include "view.h"

using namespace ppma;

namespace {

// Channels that are walked through together, a row at a time, so that whole cache lines are used while they are there.
constexpr int64_t kGroupBytes = 256;
// Column states of a group that stay in the second-level cache.
constexpr int64_t kStateBytes = 256 << 10;
// A plane of one tensor that does not.
constexpr int64_t kFarBytes = 256 << 10;

template <int mode>
struct ScanJob {
  using Scan = PlaneScan<mode>;
  Geometry geometry;
  const PlaneTensor& out;
  int64_t group;  // vectors of channels
  int64_t units, tiles = 1;
  int64_t shared_floats, own_floats;

  ScanJob(const ScanParams& params, const PlaneTensor& out) : geometry(params), out(out) {
    constexpr int64_t kVector = kLanes * sizeof(float);
    int64_t fitting = kStateBytes / (Scan::kStates * geometry.chunk * kVector);
    group = std::clamp<int64_t>(fitting, 1, kGroupBytes / kVector);
    while (group > 1 && geometry.planes() * groups() < params.threads) group /= 2;
    units = geometry.planes() * groups();
    shared_floats = 2 * half_floats();
    own_floats = floats_of<typename Scan::Space>(geometry.chunk);
  }

  int64_t groups() const { return (geometry.vectors() + group - 1) / group; }
  int64_t half_floats() const { return group * StateRow<Scan::kStates>::floats(geometry.chunk); }

  void inwards(int64_t unit, int64_t, bool lower, float* shared, float* own) const {
    float* states = shared + lower * half_floats();
    std::fill_n(states, half_floats(), 0.0f);
    walk<true>(unit, lower, states, own);
  }

  void outwards(int64_t unit, int64_t, bool lower, float* shared, float* own) const {
    walk<false>(unit, lower, shared + !lower * half_floats(), own);
  }

  // Never inlined: two copies might be compiled to different roundings.
  template <bool inwards>
  [[gnu::noinline]] void walk(int64_t unit, bool lower, float* states, float* own) const {
    bool far = int64_t(geometry.height() * geometry.width() * geometry.channels() * sizeof(float)) > kFarBytes;
    int64_t plane = unit / groups(), first = unit % groups() * group;
    int64_t last = std::min(first + group, geometry.vectors());
    Half half{lower, geometry.edges(plane)};
    Arena arena(own);
    typename Scan::Space space(arena, half.edges.width);
    bool adds = geometry.params.add || !inwards;
    for (int64_t done = 0; done < half.rows(); ++done) {
      int64_t r = inwards ? done : half.rows() - 1 - done;
      int64_t i = half.row(r);
      int64_t next = half.row(inwards ? std::min(r + 1, half.rows() - 1) : std::max<int64_t>(r - 1, 0));
      for (int64_t vector = first; vector < last; ++vector) {
        ChannelPlane from = geometry.channels(geometry.params.x, plane, vector);
        ChannelPlane to = geometry.channels(out, plane, vector);
        Row next_x = from.in_memory(next), next_y = to.in_memory(next), y = to.writable(i, space.out, adds);
        StateRow<Scan::kStates> row_states{states + (vector - first) * StateRow<Scan::kStates>::floats(half.edges.width)};
        Scan::template step<inwards>(from.read(i, space.in), half.edges.along(i), inwards ? half.outer(r) : half.inner(r),
                                     half.edges.width, row_states, space, [&](int64_t j, Vec value) PPMA_INLINE {
                                       if (far) {
                                         next_x.prefetch(j);
                                         next_y.prefetch<true>(j);
                                       }
                                       y.put(j, adds ? y(j) + value : value);
                                     });
        to.write_back(i, space.out);
      }
    }
  }
};

}  // namespace

PPMA_EXPORT int ppma_polyline_scan(const ScanParams* params, const PlaneTensor* out) {
  return with_mode<kColumns, kV2H, kH2V, kBoth>(params->mode, [&](auto mode) {
    return run_halves(ScanJob<mode>(*params, *out), static_cast<int>(params->threads));
  });
}
