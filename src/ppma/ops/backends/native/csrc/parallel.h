// Threads, their scratch memory, and what a kernel changes in the CPU's state while it runs.
//
// Every kernel gives the same bits with any number of threads: work is divided into pieces that do not depend on the
// number of threads, and no two pieces add to the same value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ppma {

// Decays multiply to numbers below the normal range, on which some CPUs are a hundred times slower: they count as 0
// while a kernel runs on this thread.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Scratch memory of the calling thread, kept between calls because fresh pages are expensive. Aligned to a cache line.
// The contents are undefined. Asking again for the same slot invalidates what was given before.
class Scratch {
 public:
  // Null if there is no memory.
  template <int Slot = 0>
  static float* floats(size_t count) {
    static thread_local Scratch own;
    return own.grow(count);
  }

  ~Scratch() { std::free(data_); }

 private:
  float* grow(size_t count) {
    if (count > count_) {
      std::free(data_);
      size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      count_ = data_ ? count : 0;
    }
    return data_;
  }

  float* data_ = nullptr;
  size_t count_ = 0;
};

// The threads that work on one piece together; each runs the same code.
struct Team {
  int size;
  int rank;

  // Runs body(index) for this thread's share of [0, count).
  template <class Body>
  void share(int64_t count, Body body) const {
    for (int64_t index = rank; index < count; index += size) body(index);
  }

  // Waits until all have come here.
  void barrier() const {
    if (size > 1) {
#pragma omp barrier
    }
  }
};

// Runs body(team) once on each of `threads` threads.
template <class Body>
void together(int threads, Body body) {
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      FlushDenormals guard;
      body(Team{omp_get_num_threads(), omp_get_thread_num()});
    }
    return;
  }
#endif
  FlushDenormals guard;
  body(Team{1, 0});
}

// Runs body(index) for every index of [0, count), on up to `threads` threads.
template <class Body>
void parallel_for(int64_t count, int threads, Body body) {
  if (threads > count) threads = static_cast<int>(count);
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      FlushDenormals guard;
#pragma omp for schedule(dynamic)
      for (int64_t index = 0; index < count; ++index) body(index);
    }
    return;
  }
#endif
  FlushDenormals guard;
  for (int64_t index = 0; index < count; ++index) body(index);
}

}  // namespace ppma
