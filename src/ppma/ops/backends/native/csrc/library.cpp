// The version, threads and memory of the library, and its exponentials for the tests of their error bounds.
#include "parallel.h"
#include "simd.h"
#include "view.h"

using namespace ppma;

namespace {

template <class Function>
int map(const float* x, float* y, int64_t count, Function function) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) store(y + at, function(load(x + at)));
  int rest = static_cast<int>(count - at);
  if (rest > 0) store_part(y + at, function(load_part(x + at, rest)), rest);
  return 0;
}

}  // namespace

PPMA_EXPORT int ppma_exp(const float* x, float* y, int64_t count) {
  return map(x, y, count, [](Vec v) { return ppma::exp(v); });
}

PPMA_EXPORT int ppma_exp2(const float* x, float* y, int64_t count) {
  return map(x, y, count, [](Vec v) { return ppma::exp2(v); });
}

// Changes with every structure and function signature: library.py refuses another.
PPMA_EXPORT int ppma_abi() { return 17; }

// The number of threads that a parallel region really gets.
PPMA_EXPORT int ppma_team_size(int threads, int32_t* size) {
  parallel_region(threads, [&](Team team) {
    if (team.rank == 0) *size = team.size;
  });
  return 0;
}

// The scratch memory that the threads keep between calls.
PPMA_EXPORT int ppma_scratch_bytes(int64_t* bytes) {
  *bytes = Scratch::bytes();
  return 0;
}
