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

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
inline void store(float* to, Vec x) { *reinterpret_cast<UnalignedVec*>(to) = x; }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

// The numbers 0, 1, ..., kLanes - 1.
inline IntVec lane_index() {
  IntVec index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
  return index;
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

// NaN in `a` is passed on.
inline Vec max(Vec a, Vec b) { return select(b > a, b, a); }
inline Vec min(Vec a, Vec b) { return select(b < a, b, a); }

// Sum and largest of all lanes, always in the same order.
inline float sum(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline float largest(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane)
      if (lanes[lane + half] > lanes[lane]) lanes[lane] = lanes[lane + half];
  return lanes[0];
}

// 2^(whole + rest) for a whole number and a rest in [-1/2, 1/2].
inline Vec scale_by_power(Vec rest, IntVec whole) {
  // Relative minimax polynomial of degree 6, error 1.6e-8 before rounding; exactly 1 at 0.
  Vec p = splat(0x1.41fbbcp-13f);
  p = p * rest + 0x1.5f3e52p-10f;
  p = p * rest + 0x1.3b2d4cp-7f;
  p = p * rest + 0x1.c6aee8p-5f;
  p = p * rest + 0x1.ebfbdcp-3f;
  p = p * rest + 0x1.62e430p-1f;
  p = p * rest + 1.0f;
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + (whole << 23));
}

constexpr float kLog2E = 0x1.715476p+0f;
// Added and subtracted, it rounds to the nearest whole number, which then stands in the low bits of the sum.
constexpr float kRound = 0x1.8p+23f;
constexpr int32_t kRoundBits = 0x4b400000;

// 2^x, relative error at most 1.5e-7 (tests/ops/test_native_library.py); 0 below the smallest normal number, inf from 128
// on, NaN for NaN.
inline Vec exp2(Vec x) {
  Vec clamped = min(max(x, splat(-126.0f)), splat(128.0f));
  Vec shifted = clamped + kRound;
  Vec result = scale_by_power(clamped - (shifted - kRound), reinterpret_cast<IntVec>(shifted) - kRoundBits);
  return select(x < -126.0f, Vec{}, result);
}

// e^x, relative error at most 1.8e-7, with the same limits.
inline Vec exp(Vec x) {
  Vec clamped = min(max(x, splat(-87.336544f)), splat(88.72284f));
  Vec shifted = clamped * kLog2E + kRound;
  Vec whole = shifted - kRound;
  // ln 2 in two parts, the first short enough for an exact product.
  Vec rest = (clamped - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
  Vec result = scale_by_power(rest * kLog2E, reinterpret_cast<IntVec>(shifted) - kRoundBits);
  result = select(x < -87.336544f, Vec{}, result);
  return select(x > 88.72283f, splat(__builtin_inff()), result);
}

}  // namespace ppma
