// Rotary embeddings: rotates pairs of neighbouring channels by the angles of their token.
#include "parallel.h"
#include "simd.h"
#include "view.h"

using namespace ppma;

// x and out are (batch, tokens, groups * d) with unit stride in the last axis; cosine and sine are (tokens, d), equal for
// both channels of a pair. y[2m] = x[2m] cos - x[2m+1] sin, y[2m+1] = x[2m+1] cos + x[2m] sin; `direction` is 1, or
// -1 to rotate back.
PPMA_EXPORT int ppma_rotary(const View* x, const float* cosine, const float* sine, const View* out,
                            const int64_t* sizes, float direction, int threads) {
  int64_t batch = sizes[0], tokens = sizes[1], groups = sizes[2], d = sizes[3];
  constexpr int64_t kTokens = 64;  // of a task
  int64_t pieces = (tokens + kTokens - 1) / kTokens;
  Vec signs;
  for (int lane = 0; lane < kLanes; ++lane) signs[lane] = lane % 2 ? direction : -direction;
  IntVec partner = lane_index() ^ 1;
  parallel_for(batch * pieces, threads, [&](int64_t task) {
    int64_t image = task / pieces, begin = task % pieces * kTokens;
    for (int64_t token = begin; token < begin + kTokens && token < tokens; ++token) {
      const float* from = x->at(image, token, 0, 0);
      float* to = out->at(image, token, 0, 0);
      const float *c = cosine + token * d, *s = sine + token * d;
      for (int64_t group = 0; group < groups; ++group, from += d, to += d) {
        for (int64_t m = 0; m < d; m += kLanes) {
          // Whole vectors where possible: masked stores take many cycles on AMD's AVX2.
          int count = static_cast<int>(d - m < kLanes ? d - m : kLanes);
          bool whole = count == kLanes;
          auto take = [&](const float* row) { return whole ? load(row + m) : load_part(row + m, count); };
          Vec value = take(from);
          Vec rotated = value * take(c) + shuffle(value, partner) * signs * take(s);
          if (whole)
            store(to + m, rotated);
          else
            store_part(to + m, rotated, count);
        }
      }
    }
  });
  return 0;
}
