#include "line_map.h"

#include <cmath>

#include "lane_sums.h"

namespace ppma {

namespace {

// Scores up to this magnitude need no maximum: no exponential overflows, and no mask that underflows could count against
// the token itself, whose mask is 1: exp(2 * 30) * 2^-126 < 2^-39.
constexpr float kSafeScore = 30.0f;

// The largest magnitude that a score of the line can have, from the lengths of its packed queries and keys; NaN if one of
// these is NaN.
float score_bound(const LineScratch& scratch, int64_t n, int64_t d, float scale) {
  int64_t width = padded(n);
  Vec of_keys{}, of_queries{}, all{};  // `max` loses NaN, the sum does not
  for (int64_t l = 0; l < n; l += kLanes) {
    Vec squares{};
    for (int64_t c = 0; c < d; ++c) {
      Vec x = load(scratch.keys + c * width + l);
      squares += x * x;
    }
    of_keys = max(of_keys, squares);
    all += squares;
  }
  for (int64_t j = 0; j < width; ++j) {
    Vec squares{};
    for (int64_t c = 0; c < (j < n ? d : 0); c += kLanes) {
      Vec x = load(scratch.queries + j * padded(d) + c);
      squares += x * x;
    }
    store(scratch.lanes + j * kLanes, squares);
  }
  for (int64_t j = 0; j < n; j += kLanes) {
    Vec squares = sum_each(scratch.lanes + j * kLanes);
    of_queries = max(of_queries, squares);
    all += squares;
  }
  return std::sqrt(largest(of_keys) * largest(of_queries)) * std::fabs(scale) + 0.0f * sum(all);
}

// Exponentials of bounded scores, times the decays.
template <bool kLogit>
struct BoundedWeights {
  int64_t n, width;
  float scale;          // to base 2
  const float* decays;  // n x n
  float* lanes;         // of LineScratch
  float* weights;       // n x n, 0 in what pads a row
  float* softmax;       // without the decays; null if it is not needed

  void operator()(int64_t row, int64_t column, Vec x) const {
    int64_t at = row * width + column;
    Vec e = exp2_bounded(x * scale), weighted = e * load(decays + at);
    store(weights + at, weighted);
    if (!kLogit) {
      if (column + kLanes > n) e = select(lane_index() < static_cast<int>(n - column), e, Vec{});
      if (softmax) store(softmax + at, e);
    }
    float* total = lanes + row * kLanes;
    store(total, load(total) + (kLogit ? weighted : e));
  }
};

// Packs queries and keys. If no score can be large, computes the weights and one over each row's sum, and returns true.
template <bool kLogit>
bool bounded_map(const Line& line, const LineScratch& scratch, float* weights, float* softmax, float* row_scale) {
  const AttentionParams& params = line.params;
  int64_t n = line.size(), width = padded(n);
  Tokens q = line.of(params.q), k = line.of(params.k), log_decay = line.of(line.log_decay());
  pack_rows(q.data, q.stride, n, params.d, scratch.queries);
  pack_columns(k.data, k.stride, n, params.d, 1.0f, scratch.keys, width);
  if (!line.all_valid() || !(score_bound(scratch, n, params.d, params.scale) <= kSafeScore)) return false;
  DecayProducts(scratch.products, n).write(log_decay.data, log_decay.stride, scratch.decays);
  for (int64_t j = 0; j < width; ++j) store(scratch.lanes + j * kLanes, Vec{});
  product(rows_of(scratch.queries, padded(params.d)), {scratch.keys, width}, n, width, params.d,
          BoundedWeights<kLogit>{n, width, params.scale * kLog2E, scratch.decays, scratch.lanes, weights, softmax});
  for (int64_t j = 0; j < n; j += kLanes) store(row_scale + j, 1.0f / sum_each(scratch.lanes + j * kLanes));
  return true;
}

// Scores of packed queries and keys, logits once the log mask is added; -inf in what pads a row. They are natural, and the
// scale comes after the product: scores that float32 can hold keep their exact distances, however large they are.
template <bool kLogit>
void line_scores(const Line& line, const LineScratch& scratch, float* scores) {
  const AttentionParams& params = line.params;
  int64_t n = line.size(), width = padded(n);
  Tokens log_decay = line.of(line.log_decay());
  product(rows_of(scratch.queries, padded(params.d)), {scratch.keys, width}, n, width, params.d,
          ScoreStore{scores, width, params.scale});

  Potentials::fill(scratch.potentials, log_decay.data, log_decay.stride, n, kLogit ? Base::kE : Base::kTwo);
  Potentials potentials(scratch.potentials, n);
  IntVec inside = lane_index() < static_cast<int>(n - (width - kLanes));
  const float* bias = line.key_bias();
  for (int64_t j = 0; j < n; ++j) {
    float* row = scores + j * width;
    if (bias)
      for (int64_t l = 0; l < n; ++l) row[l] += bias[l * line.key_bias_stride()];
    if (kLogit)
      for (int64_t l = 0; l < width; l += kLanes) store(row + l, load(row + l) + potentials.log_decay(j, l));
    float* last = row + width - kLanes;
    store(last, select(inside, load(last), splat(-__builtin_inff())));
  }
  if (!kLogit) decay_block(potentials, 0, n, 0, n, scratch.decays, width);
}

// exp(scores - their largest), times `factors` if they are given, in place; returns one over the sum without the factors,
// and 1 where there is no valid key and all weights are 0.
float exponentiate(float* row, int64_t width, const float* factors) {
  Vec top = load(row);
  for (int64_t l = kLanes; l < width; l += kLanes) top = max(top, load(row + l));
  float largest_score = largest(top);
  if (largest_score == -__builtin_inff()) largest_score = 0.0f;
  Vec total{};
  for (int64_t l = 0; l < width; l += kLanes) {
    Vec p = exp_weight(load(row + l) - largest_score);
    total += p;
    store(row + l, factors ? p * load(factors + l) : p);
  }
  float weights = sum(total);
  return weights == 0.0f ? 1.0f : 1.0f / weights;
}

}  // namespace

template <bool kLogit>
void line_map(const Line& line, const LineScratch& scratch, float* weights, float* row_scale) {
  int64_t n = line.size(), width = padded(n);
  if (bounded_map<kLogit>(line, scratch, weights, nullptr, row_scale)) return;
  line_scores<kLogit>(line, scratch, weights);
  for (int64_t j = 0; j < n; ++j)
    row_scale[j] = exponentiate(weights + j * width, width, kLogit ? nullptr : scratch.decays + j * width);
}

template <bool kLogit>
void line_map_and_softmax(const Line& line, const LineScratch& scratch, float* softmax, float* weights, float* row_scale) {
  int64_t n = line.size(), width = padded(n);
  bool bounded = bounded_map<kLogit>(line, scratch, kLogit ? softmax : weights, softmax, row_scale);
  if (!bounded) line_scores<kLogit>(line, scratch, softmax);
  for (int64_t j = 0; j < n; ++j) {
    float* row = softmax + j * width;
    float inverse = bounded ? row_scale[j] : exponentiate(row, width, nullptr);
    for (int64_t l = 0; l < width; l += kLanes) {
      Vec p = load(row + l) * inverse;
      store(row + l, p);
      if (!kLogit) store(weights + j * width + l, p * load(scratch.decays + j * width + l));
    }
  }
}

template void line_map<false>(const Line&, const LineScratch&, float*, float*);
template void line_map<true>(const Line&, const LineScratch&, float*, float*);
template void line_map_and_softmax<false>(const Line&, const LineScratch&, float*, float*, float*);
template void line_map_and_softmax<true>(const Line&, const LineScratch&, float*, float*, float*);

}  // namespace ppma
