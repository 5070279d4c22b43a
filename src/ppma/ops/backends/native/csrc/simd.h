// Vectors of kLanes floats for the instruction set that this translation unit is compiled for.
//
// Built on the vector extensions of GCC and Clang, so that one text serves AVX-512, AVX2 and every other CPU; products
// followed by sums become fused multiply-adds where the CPU has them (-ffp-contract=fast).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace ppma {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

constexpr int64_t kCacheLine = 16;  // floats

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitsVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) {
#if defined(__AVX512F__)
  return _mm512_loadu_ps(from);
#elif defined(__AVX__)
  return _mm256_loadu_ps(from);
#else
  return *reinterpret_cast<const UnalignedVec*>(from);
#endif
}

inline void store(float* to, Vec x) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(to, x);
#elif defined(__AVX__)
  _mm256_storeu_ps(to, x);
#else
  *reinterpret_cast<UnalignedVec*>(to) = x;
#endif
}

inline Vec splat(float x) { return x - Vec{}; }
inline Vec select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

// The numbers 0, 1, ..., kLanes - 1.
inline IntVec lane_index() {
  IntVec index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
  return index;
}

// The lanes of x, or of a with b behind it, that `index` names.
inline Vec shuffle(Vec x, IntVec index) {
#if defined(__clang__)
  Vec result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = x[index[lane]];
  return result;
#else
  return __builtin_shuffle(x, index);
#endif
}

inline Vec shuffle(Vec a, Vec b, IntVec index) {
#if defined(__clang__)
  Vec result;
  for (int lane = 0; lane < kLanes; ++lane)
    result[lane] = index[lane] < kLanes ? a[index[lane]] : b[index[lane] - kLanes];
  return result;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// The first `count` lanes (0 <= count <= kLanes); the other lanes are 0 and their memory is not touched.
inline Vec load_part(const float* from, int count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(from, reinterpret_cast<__m256i>(lane_index() < count));
#else
  Vec x{};
  std::memcpy(&x, from, sizeof(float) * count);
  return x;
#endif
}

inline void store_part(float* to, Vec x, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(to, reinterpret_cast<__m256i>(lane_index() < count), x);
#else
  std::memcpy(to, &x, sizeof(float) * count);
#endif
}

// The same, with a whole vector where all lanes exist: masked stores take many cycles on AMD's AVX2.
inline Vec load_lanes(const float* from, int lanes) { return lanes == kLanes ? load(from) : load_part(from, lanes); }
inline void store_lanes(float* to, Vec x, int lanes) {
  if (lanes == kLanes)
    store(to, x);
  else
    store_part(to, x, lanes);
}

// NaN in `a` is passed on. In terms of `select` they would be two instructions each.
#if defined(__AVX512F__)
inline Vec max(Vec a, Vec b) { return _mm512_maskz_max_ps(0xffff, b, a); }
inline Vec min(Vec a, Vec b) { return _mm512_maskz_min_ps(0xffff, b, a); }
#elif defined(__AVX__)
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(b, a); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(b, a); }
#else
inline Vec max(Vec a, Vec b) { return select(b > a, b, a); }
inline Vec min(Vec a, Vec b) { return select(b < a, b, a); }
#endif

// 1 / x for |x| in [2^-100, 2^100], to within 2 units in the last place: on x86 a table and a Newton step, because a
// division costs as much as ten products there.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  Vec guess = _mm512_maskz_rcp14_ps(0xffff, x);
#elif defined(__AVX__)
  Vec guess = _mm256_rcp_ps(x);
#else
  return 1.0f / x;
#endif
#if defined(__AVX__)
  return guess * (2.0f - x * guess);
#endif
}

// Sum and largest of all lanes, always in the same order.
template <class Combine>
inline float reduce(Vec x, Combine combine) {
  for (int half = kLanes / 2; half > 0; half /= 2) x = combine(x, shuffle(x, lane_index() ^ half));
  return x[0];
}

inline float sum(Vec x) {
  return reduce(x, [](Vec a, Vec b) { return a + b; });
}

inline float largest(Vec x) {
  return reduce(x, [](Vec a, Vec b) { return max(a, b); });
}

// Transposes a square of kLanes x kLanes: swaps the off-diagonal halves, then those of each half, and so on.
inline void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
    IntVec low = lane_index() & ~half, second = (lane_index() & half) != 0;
    IntVec upper = low | (second & kLanes), lower = upper | half;
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & half) continue;
      Vec a = rows[row], b = rows[row + half];
      rows[row] = shuffle(a, b, upper);
      rows[row + half] = shuffle(a, b, lower);
    }
  }
}

// 2^x for x in [-1/2, 1/2]: minimax polynomial of degree 6, relative error 1.6e-8 before rounding; exactly 1 at 0.
inline Vec exp2_near_zero(Vec x) {
  Vec p = splat(0x1.41fbbcp-13f);
  p = p * x + 0x1.5f3e52p-10f;
  p = p * x + 0x1.3b2d4cp-7f;
  p = p * x + 0x1.c6aee8p-5f;
  p = p * x + 0x1.ebfbdcp-3f;
  p = p * x + 0x1.62e430p-1f;
  return p * x + 1.0f;
}

constexpr float kLog2E = 0x1.715476p+0f;
// Added and subtracted, it rounds to the nearest whole number, which is then in the low bits of the sum.
constexpr float kRound = 0x1.8p+23f;

// x * 2^whole, where `shifted` is whole + kRound and the result is a normal number.
inline Vec times_power(Vec x, Vec shifted) {
  return reinterpret_cast<Vec>(reinterpret_cast<BitsVec>(x) + (reinterpret_cast<BitsVec>(shifted) << 23));
}

// 2^x for |x| <= 126 with a relative error of at most 1.2e-7.
inline Vec exp2_bounded(Vec x) {
  Vec shifted = x + kRound;
  return times_power(exp2_near_zero(x - (shifted - kRound)), shifted);
}

// 2^x for x <= 127 with a relative error of at most 1.2e-7 (tests/ops/test_native_library.py); 0 below the smallest
// normal number, NaN for NaN.
inline Vec exp2(Vec x) {
  IntVec tiny = x < -126.0f;
  return select(tiny, Vec{}, exp2_bounded(select(tiny, splat(-126.0f), x)));
}

// e^x for x <= 0, the weight of a logit x below the largest: within 2e-8 of it, whatever the size of the others;
// exactly 1 at 0, 0 below the smallest normal number, NaN for NaN. As fast as exp2, and less exact than exp far from 0.
inline Vec exp_weight(Vec x) {
  IntVec tiny = x < -87.336544f;
  x = select(tiny, splat(-87.336544f), x);
  Vec shifted = x * kLog2E + kRound;
  Vec rest = x * kLog2E - (shifted - kRound);
  return select(tiny, Vec{}, times_power(exp2_near_zero(rest), shifted));
}

// e^x for -87 <= x <= 88.7 with a relative error of at most 1.5e-7; NaN for NaN.
inline Vec exp_bounded(Vec x) {
  Vec shifted = x * kLog2E + kRound;
  Vec whole = shifted - kRound;
  // ln 2 in two parts, the first short enough for an exact product.
  Vec rest = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
  return times_power(exp2_near_zero(rest * kLog2E), shifted);
}

// e^x with a relative error of at most 1.5e-7; 0 below the smallest normal number, inf above the largest, NaN for NaN.
inline Vec exp(Vec x) {
  IntVec tiny = x < -87.336544f, huge = x > 88.722839f;
  Vec result = exp_bounded(select(huge, splat(88.722839f), select(tiny, splat(-87.336544f), x)));
  return select(tiny, Vec{}, select(huge, splat(__builtin_inff()), result));
}

}  // namespace ppma
