// Threads, their scratch memory, and what a kernel changes in the CPU's state while it runs.
//
// Every kernel gives the same bits with any number of threads: no two pieces of the work add to the same value, and where
// a value depends on how the work is divided, that does not depend on the number of threads.
#pragma once

#include <algorithm>
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

  // Runs body(index) for this thread's share of [0, count), in ascending order without gaps.
  template <class Body>
  void share(int64_t count, Body body) const {
    for (int64_t index = count * rank / size; index < count * (rank + 1) / size; ++index) body(index);
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

// The indices [0, count), a range of them for each thread. With a kernel's tasks in the order of the images, a thread finds
// what it wrote in the kernel before in its own cache, and never in that of a core far away. A thread that is done with its
// range helps with the others.
class Shares {
 public:
  Shares(int64_t count, int threads) : count_(count), ranges_(std::min(threads, kMostRanges)) {
    for (int range = 0; range < ranges_; ++range) next_[range].index = first(range);
  }

  // Runs body(index) for what the thread `rank` gets to do.
  template <class Body>
  void run(int rank, Body body) {
    for (int turn = 0; turn < ranges_; ++turn) {
      const int range = (rank + turn) % ranges_;
      const int64_t end = first(range + 1);
      for (int64_t index = next_[range].index++; index < end; index = next_[range].index++) body(index);
    }
  }

 private:
  static constexpr int kMostRanges = 64;
  struct alignas(64) Next {
    std::atomic<int64_t> index;
  };

  int64_t first(int range) const { return count_ * range / ranges_; }

  const int64_t count_;
  const int ranges_;
  Next next_[kMostRanges];
};

// Runs body(task, team, shared, own) for every task, with `shared_floats` of scratch for each task and `own_floats` for
// each thread. Where there are few tasks and each has at least as many `shares` as there are threads, all threads work on
// each task in turn as one team; else every thread takes tasks for itself. Returns 1 if there is no memory.
template <class Body>
int for_tasks(int64_t tasks, int64_t shares, int threads, size_t shared_floats, size_t own_floats, Body body) {
  if (tasks == 0) return 0;
  bool in_turn = threads > 1 && shares >= threads && tasks < 4 * threads && tasks % threads != 0;
  float* common = in_turn ? Scratch::floats<1>(shared_floats) : nullptr;
  std::atomic<bool> failed{in_turn && !common};
  Shares alone(tasks, threads);
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
      alone.run(team.rank, [&](int64_t task) { body(task, Team{1, 0}, shared, own); });
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
  Shares shares(count, threads);
  parallel_region(threads, [&](Team team) { shares.run(team.rank, body); });
}

// Runs body(first image, images, threads) until all images of a batch are done: as many of them as there are for every
// thread alone, up to `alone` at a time or none if that is 0, and the rest up to `together` at a time by all threads.
// Returns 1 if a call did.
template <class Body>
int for_images(int64_t batch, int threads, int64_t alone, int64_t together, Body body) {
  const int64_t of_thread = alone ? batch / threads : 0, pieces = alone ? (of_thread + alone - 1) / alone : 0;
  std::atomic<int> failed{0};
  parallel_for(threads * pieces, threads, [&](int64_t task) {
    const int64_t first = task / pieces * of_thread, piece = task % pieces;
    const int64_t begin = first + of_thread * piece / pieces, end = first + of_thread * (piece + 1) / pieces;
    if (!failed && body(begin, end - begin, 1)) failed = 1;
  });
  for (int64_t first = threads * of_thread; first < batch && !failed; first += together)
    failed = body(first, std::min(together, batch - first), threads);
  return failed;
}

}  // namespace ppma
