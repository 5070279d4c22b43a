// Rotates neighbouring channel pairs by the angles of their token (RoPE).
#include "parallel.h"
#include "simd.h"
#include "view.h"

using namespace ppma;

// x and out are (batch, tokens, groups * d) with unit stride in the last axis; cosine and sine are (tokens, d), equal for
// both channels of a pair. y[2m] = x[2m] cos - x[2m+1] sin, y[2m+1] = x[2m+1] cos + x[2m] sin; `sign` is 1, or -1 for
// the inverse rotation.
PPMA_EXPORT int ppma_rotary(const View* x, const float* cosine, const float* sine, const View* out,
                            const int64_t* sizes, float sign, int threads) {
  int64_t batch = sizes[0], tokens = sizes[1], groups = sizes[2], d = sizes[3];
  constexpr int64_t kTokens = 64;  // of a task
  int64_t pieces = (tokens + kTokens - 1) / kTokens;
  Vec signs;
  for (int lane = 0; lane < kLanes; ++lane) signs[lane] = lane % 2 ? sign : -sign;
  IntVec partner = lane_index() ^ 1;
  parallel_for(batch * pieces, threads, [&](int64_t task) {
    int64_t image = task / pieces, begin = task % pieces * kTokens;
    for (int64_t token = begin; token < begin + kTokens && token < tokens; ++token) {
      const float* from = x->at(image, token, 0, 0);
      float* to = out->at(image, token, 0, 0);
      const float *c = cosine + token * d, *s = sine + token * d;
      for (int64_t group = 0; group < groups; ++group, from += d, to += d) {
        for (int64_t m = 0; m < d; m += kLanes) {
          int count = static_cast<int>(d - m < kLanes ? d - m : kLanes);
          Vec value = load_part(from + m, count);
          Vec swapped = __builtin_shuffle(value, partner);
          store_part(to + m, value * load_part(c + m, count) + swapped * signs * load_part(s + m, count), count);
        }
      }
    }
  });
  return 0;
}
