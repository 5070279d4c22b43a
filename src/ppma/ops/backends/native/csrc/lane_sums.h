// Sums of the lanes of many vectors at once.
#pragma once

#include "simd.h"

namespace ppma {

// Adds neighbouring groups of `group` lanes: groups of a and of b take turns in the result.
template <int group>
inline Vec add_neighbours(Vec a, Vec b) {
  IntVec even, odd;
  for (int lane = 0; lane < kLanes; ++lane) {
    bool from_a = lane / group % 2 == 0;
    even[lane] = from_a ? lane : kLanes + lane - group;
    odd[lane] = from_a ? lane + group : kLanes + lane;
  }
  return shuffle(a, b, even) + shuffle(a, b, odd);
}

// Of every four lanes, those of a in the even and of b in the odd ones, each the sum of two that lie two lanes apart. The
// shuffles of this are cheaper than those of neighbours.
inline Vec add_pairs(Vec a, Vec b) {
  IntVec low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane / 4 * 4 + lane % 4 / 2 + lane % 2 * kLanes;
    high[lane] = low[lane] + 2;
  }
  return shuffle(a, b, low) + shuffle(a, b, high);
}

// Lane l of the result is the sum of the lanes of vector l, for `count` vectors from `first` on. Of `known` neighbours each
// the sums are already in one vector, which at(index / known) returns.
template <int count, int known, int first, class At>
inline Vec sum_each(const At& at) {
  if constexpr (count == known) {
    return at(first / known);
  } else if constexpr (count == 4 && known == 1) {
    return add_pairs(add_pairs(at(first), at(first + 2)), add_pairs(at(first + 1), at(first + 3)));
  } else {
    // Halving from the top: vectors that differ in the highest bit of their index meet last, in the widest groups.
    constexpr int half = count / 2;
    return add_neighbours<half>(sum_each<half, known, first>(at), sum_each<half, known, first + half>(at));
  }
}

// The same of kLanes vectors in memory.
inline Vec sum_each(const float* lanes) {
  return sum_each<kLanes, 1, 0>([lanes](int index) { return load(lanes + index * kLanes); });
}

}  // namespace ppma
