// Runs the halves of planes on several threads. The result does not depend on who runs which half.
#pragma once

#include <atomic>

#include "plane.h"

namespace ppma {

// A job has
//   units, tiles                 the tiles of a unit follow one another, because they may add to the same results
//   shared_floats, own_floats    scratch of each unit, which lasts from inwards to outwards, and of each thread
//   inwards(unit, tile, lower, shared, own)
//   outwards(unit, tile, lower, shared, own)   after both halves have gone inwards
// Returns 1 if there was no memory.
template <class Job>
int run_halves(const Job& job, int threads) {
  std::atomic<bool> failed{false};
  if (job.units == 0) return 0;
  if (threads == 1 || job.units >= 2 * threads) {
    parallel_for(job.units, threads, [&](int64_t unit) {
      float* shared = Scratch::floats<1>(job.shared_floats);
      float* own = Scratch::floats<0>(job.own_floats);
      if (!shared || !own) failed = true;
      if (failed) return;
      for (int64_t tile = 0; tile < job.tiles; ++tile) {
        for (bool lower : {false, true}) job.inwards(unit, tile, lower, shared, own);
        for (bool lower : {false, true}) job.outwards(unit, tile, lower, shared, own);
      }
    });
    return failed;
  }
  float* shared = Scratch::floats<1>(job.units * job.shared_floats);
  if (!shared) return 1;
  auto both_halves = [&](auto walk) {
    parallel_for(2 * job.units, threads, [&](int64_t index) {
      float* own = Scratch::floats<0>(job.own_floats);
      if (!own) failed = true;
      if (!failed) walk(index / 2, index % 2 == 1, shared + index / 2 * job.shared_floats, own);
    });
  };
  for (int64_t tile = 0; tile < job.tiles; ++tile) {
    both_halves([&](int64_t unit, bool lower, float* space, float* own) {
      job.inwards(unit, tile, lower, space, own);
    });
    both_halves([&](int64_t unit, bool lower, float* space, float* own) {
      job.outwards(unit, tile, lower, space, own);
    });
  }
  return failed;
}

}  // namespace ppma
