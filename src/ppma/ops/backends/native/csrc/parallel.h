// Threads, their scratch memory, and what a kernel changes in the CPU's state while it runs.
//
// Every kernel gives the same bits with any number of threads: no two pieces of the work add to the same value, and where
// a value depends on how the work is divided, that does not depend on the number of threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(PPMA_OWN_THREADS)
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace ppma {

#if defined(PPMA_OWN_THREADS)
// For ThreadSanitizer, which understands C++ threads but nothing of OpenMP's: `make sanitize-threads`.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size), missing_(size) {}

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t round = round_;
    if (--missing_ == 0) {
      missing_ = size_;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  const int size_;
  int missing_;
  int64_t round_ = 0;
};
#endif

// Decays multiply to numbers below the normal range, on which some CPUs are a hundred times slower: they count as 0
// while a kernel runs on this thread.
class [[maybe_unused]] FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// Scratch memory of the calling thread, kept between calls because fresh pages are expensive. Aligned to a cache line.
// The contents are undefined. A second request for a slot invalidates the first.
class Scratch {
 public:
  // Null if there is no memory.
  template <int Slot = 0>
  static float* floats(size_t count) {
    return slot<Slot>().grow(count);
  }

  // Gives the memory of a slot back if it is too much to keep.
  template <int Slot = 0>
  static void trim() {
    if (slot<Slot>().count_ > kKeptFloats) slot<Slot>().release();
  }

  // What all threads keep at the moment.
  static int64_t bytes() { return bytes_; }

  ~Scratch() { release(); }

 private:
  static constexpr size_t kKeptFloats = size_t{1} << 24;

  template <int Slot>
  static Scratch& slot() {
    static thread_local Scratch own;
    return own;
  }

  float* grow(size_t count) {
    if (count > count_) {
      release();
      size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      count_ = data_ ? count : 0;
      bytes_ += count_ * sizeof(float);
    }
    return data_;
  }

  void release() {
    bytes_ -= count_ * sizeof(float);
    std::free(data_);
    data_ = nullptr;
    count_ = 0;
  }

  static inline std::atomic<int64_t> bytes_{0};
  float* data_ = nullptr;
  size_t count_ = 0;
};

// Divides memory into parts aligned to a cache line; without memory it only counts how much they take.
class Arena {
 public:
  explicit Arena(float* memory) : memory_(memory) {}

  float* take(int64_t count) {
    float* part = memory_ ? memory_ + taken_ : nullptr;
    taken_ += (count + 15) / 16 * 16;
    return part;
  }

  int64_t taken() const { return taken_; }

 private:
  float* memory_;
  int64_t taken_ = 0;
};

// How many floats a `Layout` takes from an arena, which it does in its constructor.
template <class Layout, class... Arguments>
int64_t floats_of(const Arguments&... arguments) {
  Arena arena(nullptr);
  Layout(arena, arguments...);
  return arena.taken();
}

// The threads that work on one task together; each runs the same code.
struct Team {
  int size;
  int rank;
#if defined(PPMA_OWN_THREADS)
  Barrier* meeting = nullptr;
#endif

  // Runs body(index) for this thread's share of [0, count).
  template <class Body>
  void share(int64_t count, Body body) const {
    for (int64_t index = rank; index < count; index += size) body(index);
  }

  // Waits for the whole team.
  void barrier() const {
#if defined(PPMA_OWN_THREADS)
    if (size > 1) meeting->wait();
#elif defined(_OPENMP)
    if (size > 1) {
#pragma omp barrier
    }
#endif
  }
};

// Runs body(team) on each of `threads` threads.
template <class Body>
void parallel_region(int threads, Body body) {
#if defined(PPMA_OWN_THREADS)
  Barrier barrier(threads);
  std::vector<std::thread> team;
  for (int rank = 0; rank < threads; ++rank)
    team.emplace_back([&barrier, &body, threads, rank] {
      FlushDenormals guard;
      body(Team{threads, rank, &barrier});
    });
  for (std::thread& thread : team) thread.join();
  return;
#elif defined(_OPENMP)
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

// Runs body(task, team, shared, own) for every task, with `shared_floats` of scratch for each task and `own_floats` for
// each thread. Where there are few tasks and each has at least as many `shares` as there are threads, all threads work on
// each task in turn as one team; else every thread takes tasks for itself. Returns 1 if there is no memory.
template <class Body>
int for_tasks(int64_t tasks, int64_t shares, int threads, size_t shared_floats, size_t own_floats, Body body) {
  if (tasks == 0) return 0;
  bool in_turn = threads > 1 && shares >= threads && tasks < 4 * threads && tasks % threads != 0;
  float* common = in_turn ? Scratch::floats<1>(shared_floats) : nullptr;
  std::atomic<bool> failed{in_turn && !common};
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](Team team) {
    float* own = Scratch::floats<0>(own_floats);
    float* shared = in_turn ? common : Scratch::floats<1>(shared_floats);
    if (!own || !shared) failed = true;
    team.barrier();
    if (failed) return;
    if (in_turn) {
      for (int64_t task = 0; task < tasks; ++task) {
        body(task, team, shared, own);
        team.barrier();
      }
    } else {
      for (int64_t task = next++; task < tasks; task = next++) body(task, Team{1, 0}, shared, own);
    }
    team.barrier();
    Scratch::trim<0>();
    Scratch::trim<1>();
  });
  return failed ? 1 : 0;
}

// Runs body(index) for every index of [0, count), on up to `threads` threads.
template <class Body>
void parallel_for(int64_t count, int threads, Body body) {
  if (count == 0) return;
  if (threads > count) threads = static_cast<int>(count);
#if defined(PPMA_OWN_THREADS)
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](Team) {
    for (int64_t index = next++; index < count; index = next++) body(index);
  });
  return;
#elif defined(_OPENMP)
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
