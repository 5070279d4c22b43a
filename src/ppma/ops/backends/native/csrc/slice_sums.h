// Products of one head's slice of several tokens with the weights of its decays, with the tokens in the lanes.
#pragma once

#include "lane_sums.h"

namespace ppma {

// Lane t of results[o] is the sum over the vectors at c = begin, begin + kLanes, ... < end of all lanes of
// token(t, c, place(c)) * weight(o, c), of at least one vector.
template <int kOutputs, class Place, class Token, class Weight>
inline void slice_sums(int64_t begin, int64_t end, const Place& place, const Token& token, const Weight& weight,
                       Vec (&results)[kOutputs]) {
  constexpr int kTokens = kLanes == 16 ? 8 : 4;  // whose sums stay in registers
  Vec sums[kOutputs][kLanes / kTokens];
#pragma GCC unroll 4
  for (int first = 0; first < kLanes; first += kTokens) {
    Vec products[kOutputs][kTokens];
#pragma GCC unroll 2
    for (int o = 0; o < kOutputs; ++o) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) products[o][t] = Vec{};
    }
    int64_t c = begin;
    do {
      const int64_t at = place(c);
      Vec weights[kOutputs];
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; ++o) weights[o] = weight(o, c);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        Vec here = token(first + t, c, at);
#pragma GCC unroll 2
        for (int o = 0; o < kOutputs; ++o) products[o][t] += here * weights[o];
      }
      c += kLanes;
    } while (c < end);
#pragma GCC unroll 2
    for (int o = 0; o < kOutputs; ++o)
      sums[o][first / kTokens] = sum_each<kTokens, 1, 0>([&](int t) { return products[o][t]; });
  }
#pragma GCC unroll 2
  for (int o = 0; o < kOutputs; ++o)
    results[o] = sum_each<kLanes, kTokens, 0>([&](int index) { return sums[o][index]; });
}

}  // namespace ppma
