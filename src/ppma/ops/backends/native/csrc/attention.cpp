// Full attention: every token attends to every token, in one pass over tiles of keys for each block of queries.
//
// "hadamard": the usual running maximum and sum of the unmasked softmax; the mask multiplies what is accumulated.
// "logit": one running softmax of scores plus log mask for each path.
#include "attention_tiles.h"
#include "small_attention.h"

using namespace ppma;

namespace {

// A running softmax of each query of a block.
struct Softmax {
  float *top, *total;  // the running maximum of the logits, and the sum of exp(logit - top)
  float* out;          // queries x dv: the sum of exp(logit - top) * mask * value

  Softmax(Arena& arena, int64_t queries, int64_t channels)
      : top(arena.take(queries)), total(arena.take(queries)), out(arena.take(queries * channels)) {}

  void clear(int64_t queries, int64_t channels) {
    for (int64_t q = 0; q < queries; ++q) top[q] = -__builtin_inff(), total[q] = 0.0f;
    std::memset(out, 0, sizeof(float) * queries * channels);
  }

  // Raises the maximum to `seen` if that is larger; returns what to subtract from the logits.
  float raise(int64_t query, float seen, int64_t channels) {
    if (seen > top[query]) {
      float factor = exp_weight(splat(top[query] - seen))[0];
      top[query] = seen;
      total[query] *= factor;
      float* row = out + query * channels;
      for (int64_t c = 0; c < channels; c += kLanes) store(row + c, load(row + c) * factor);
    }
    return top[query] == -__builtin_inff() ? 0.0f : top[query];
  }

  // No valid key, no weights: 0 instead of 0 / 0, here and where the backward pass uses the same numbers.
  void close(int64_t query) {
    if (total[query] == 0.0f) top[query] = 0.0f, total[query] = 1.0f;
  }
};

// exp(row - top) in place for `count` numbers; returns the sum. Writes whole vectors.
float exponentiate(float* row, int64_t count, float top) {
  Vec total{};
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    Vec p = exp_weight(load(row + c) - top);
    total += p;
    store(row + c, p);
  }
  if (c < count) {
    int rest = static_cast<int>(count - c);
    Vec p = select(lane_index() < rest, exp_weight(load(row + c) - top), Vec{});
    total += p;
    store(row + c, p);
  }
  return sum(total);
}

template <bool kLogit>
struct ThreadScratch {
  float* queries;    // queries x d
  float* keys;       // d x keys
  float* values;     // keys x dv
  float* scores[2];  // queries x keys; two if there are two softmaxes
  Softmax softmax[2];
  TileMask<kLogit> mask;

  ThreadScratch(Arena& arena, const AttentionParams& params, const Runs& query_runs, const Runs& key_runs, int64_t softmaxes)
      : queries(arena.take(query_runs.most_tokens() * padded(params.d))),
        keys(arena.take(params.d * score_stride(key_runs.most_tokens()))),
        values(arena.take(key_runs.most_tokens() * padded(params.dv))),
        scores{score_tile(arena, query_runs, key_runs, true), score_tile(arena, query_runs, key_runs, softmaxes > 1)},
        softmax{{arena, query_runs.most_tokens(), padded(params.dv)},
                {arena, softmaxes > 1 ? query_runs.most_tokens() : 0, padded(params.dv)}},
        mask(arena, query_runs, key_runs) {}

 private:
  static float* score_tile(Arena& arena, const Runs& query_runs, const Runs& key_runs, bool used) {
    return arena.take(used ? query_runs.most_tokens() * score_stride(key_runs.most_tokens()) : 0);
  }
};

template <bool kLogit>
class Forward {
 public:
  Forward(const AttentionParams& params, const AttentionResults& results, int64_t task, float* shared, Arena own)
      : params_(params),
        results_(results),
        head_{params, task / params.heads, task % params.heads},
        query_runs_(query_runs(params)),
        key_runs_(key_runs(params)),
        channels_(padded(params.dv)),
        v2h_(params.v2h),
        h2v_(params.h2v),
        softmaxes_(softmaxes_of(params)),
        saves_first_(saves_first_output(params)),
        potentials_(shared, head_),
        own_(own, params, query_runs_, key_runs_, softmaxes_) {}

  static int run(const AttentionParams& params, const AttentionResults& results) {
    int64_t own_floats = floats_of<ThreadScratch<kLogit>>(params, query_runs(params), key_runs(params), softmaxes_of(params));
    int64_t shared_floats = GridPotentials::size(params);
    if (is_small(params)) return small_attention(params, results, {shared_floats, own_floats, run_head});
    return for_tasks(params.batch * params.heads, query_runs(params).count(), params.threads, shared_floats, own_floats,
                     [&](int64_t task, Team team, float* shared, float* own) {
                       run_head(params, results, task, team, shared, own);
                     });
  }

 private:
  static void run_head(const AttentionParams& params, const AttentionResults& results, int64_t task, Team team,
                       float* shared, float* own) {
    Forward(params, results, task, shared, Arena(own)).run(team);
  }

  static int softmaxes_of(const AttentionParams& params) { return has_two_softmaxes(params) ? 2 : 1; }

  void run(Team team) {
    potentials_.fill(team);
    team.share(query_runs_.count(), [&](int64_t index) {
      block(query_runs_.at(index / query_runs_.parts(), index % query_runs_.parts()));
    });
  }

  // All keys for a block of queries.
  void block(const Run& queries) {
    head_.pack(params_.q, params_.d, queries, own_.queries);
    for (int s = 0; s < softmaxes_; ++s) own_.softmax[s].clear(queries.tokens(), channels_);
    for (int64_t part = 0; part < key_runs_.parts(); ++part) {
      if (v2h_) own_.mask.begin(potentials_, queries, key_runs_.at(0, part));
      for (int64_t group = 0; group < key_runs_.groups(); ++group) tile(queries, key_runs_.at(group, part));
    }
    finish(queries);
  }

  void tile(const Run& queries, const Run& keys) {
    int64_t count = keys.tokens(), stride = score_stride(count);
    own_.mask.next(potentials_, queries, keys);
    head_.pack(params_.v, params_.dv, keys, own_.values);
    score_tile(head_, own_.queries, queries.tokens(), keys, own_.keys, own_.scores[0]);
    for (int64_t r = 0; r < queries.rows; ++r)
      for (int64_t j = 0; j < queries.columns; ++j) weigh(r, j, r * queries.columns + j, keys, stride);
    for (int s = 0; s < softmaxes_; ++s)
      product(rows_of(own_.scores[s], stride), {own_.values, channels_}, queries.tokens(), channels_, count,
              Store{own_.softmax[s].out, channels_, true});
  }

  // From scores to weights for the query of row r and column j of a block.
  void weigh(int64_t r, int64_t j, int64_t query, const Run& keys, int64_t stride) {
    float* row = own_.scores[0] + query * stride;
    if (kLogit) {
      float* other = own_.scores[softmaxes_ - 1] + query * stride;
      float seen[2];
      add_log_mask(r, j, keys, row, other, seen);
      for (int s = 0; s < softmaxes_; ++s) exponentiate_row(s, query, keys.tokens(), seen[s], stride);
    } else {
      exponentiate_row(0, query, keys.tokens(), largest_of(row, keys.tokens()), stride);
      multiply_mask(r, j, keys, row);
    }
  }

  void exponentiate_row(int s, int64_t query, int64_t count, float seen, int64_t stride) {
    Softmax& softmax = own_.softmax[s];
    float top = softmax.raise(query, seen, channels_);
    softmax.total[query] += exponentiate(own_.scores[s] + query * stride, count, top);
  }

  static float largest_of(const float* row, int64_t count) {
    Vec top = splat(-__builtin_inff());
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) top = max(top, load(row + c));
    IntVec inside = lane_index() < static_cast<int>(count - c);
    return largest(max(top, select(inside, load(row + c), top)));
  }

  // Calls body(key row, key column, vector of weights, where it lies, which lanes are inside) for the keys of a tile. Each
  // vector is loaded before the body stores the one before it, whose last lanes may be its first: a load of what has just
  // been stored in part waits for the store.
  template <class Body>
  static void each_vector(const Run& keys, float* row, Body body) {
    Vec next = load(row);
    for (int64_t t = 0; t < keys.rows; ++t) {
      for (int64_t l = 0; l < keys.columns; l += kLanes) {
        IntVec inside = lane_index() < static_cast<int>(keys.columns - l);
        float* at = row + t * keys.columns + l;
        Vec here = next;
        next = load(l + kLanes < keys.columns ? at + kLanes : row + (t + 1) * keys.columns);
        body(t, l, here, at, inside);
      }
    }
  }

  void multiply_mask(int64_t r, int64_t j, const Run& keys, float* row) {
    const float* of_query_row = own_.mask.of_query_row(r, j);
    each_vector(keys, row, [&](int64_t t, int64_t l, Vec p, float* at, IntVec inside) {
      Vec mask{};
      if (v2h_) mask += load(of_query_row + l) * load(own_.mask.at_keys(r, t) + l);
      if (h2v_) mask += load(own_.mask.of_key_row(t, j) + l) * own_.mask.at_queries(r, t)[j];
      store(at, select(inside, p * mask, p));
    });
  }

  void add_log_mask(int64_t r, int64_t j, const Run& keys, float* row, float* other, float* seen) {
    const float* of_query_row = own_.mask.of_query_row(r, j);
    const Vec none = splat(-__builtin_inff());
    Vec top[2] = {none, none};
    each_vector(keys, row, [&](int64_t t, int64_t l, Vec score, float* at, IntVec inside) {
      if (h2v_) {
        Vec logit = score + (load(own_.mask.of_key_row(t, j) + l) + own_.mask.at_queries(r, t)[j]);
        top[softmaxes_ - 1] = max(top[softmaxes_ - 1], select(inside, logit, none));
        store(other + (at - row), select(inside, logit, score));
      }
      if (v2h_) {
        Vec logit = score + (load(of_query_row + l) + load(own_.mask.at_keys(r, t) + l));
        top[0] = max(top[0], select(inside, logit, none));
        store(at, select(inside, logit, score));
      }
    });
    for (int s = 0; s < softmaxes_; ++s) seen[s] = largest(top[s]);
  }

  // Divides by the sums and writes the results of a block.
  void finish(const Run& queries) {
    int64_t heads_before = head_.batch * params_.heads + head_.head, all = params_.batch * params_.heads;
    for (int64_t query = 0; query < queries.tokens(); ++query) {
      int64_t i = queries.row + query / queries.columns, j = queries.column + query % queries.columns;
      int64_t token = heads_before * params_.tokens() + i * params_.width + j;
      for (int s = 0; s < softmaxes_; ++s) {
        own_.softmax[s].close(query);
        if (!results_.stats) continue;
        results_.stats[2 * s * all * params_.tokens() + token] = own_.softmax[s].top[query];
        results_.stats[(2 * s + 1) * all * params_.tokens() + token] = own_.softmax[s].total[query];
      }
      float* out = results_.out.at(head_.batch, head_.head, i, j);
      float scales[2];
      for (int s = 0; s < softmaxes_; ++s) scales[s] = 1.0f / own_.softmax[s].total[query];
      for (int64_t c = 0; c < params_.dv; c += kLanes) {
        int count = params_.dv - c < kLanes ? static_cast<int>(params_.dv - c) : kLanes;
        Vec result = load(own_.softmax[0].out + query * channels_ + c) * scales[0];
        if (softmaxes_ == 2) {
          if (results_.stats && saves_first_) store_part(results_.first + token * params_.dv + c, result, count);
          result = (result + load(own_.softmax[1].out + query * channels_ + c) * scales[1]) * 0.5f;
        }
        store_part(out + c, result, count);
      }
    }
  }

  const AttentionParams& params_;
  const AttentionResults& results_;
  Head head_;
  Runs query_runs_, key_runs_;
  const int64_t channels_;
  const bool v2h_, h2v_;
  const int softmaxes_;
  const bool saves_first_;
  GridPotentials potentials_;
  ThreadScratch<kLogit> own_;
};

}  // namespace

// Whether the backward pass reads `first`, which may be null otherwise.
PPMA_EXPORT int ppma_saves_first_output(const AttentionParams* params, int32_t* saves) {
  *saves = saves_first_output(*params);
  return 0;
}

// Without `stats` nothing is kept for a backward pass.
PPMA_EXPORT int ppma_polyline_attention(const AttentionParams* params, const View* out, float* stats, float* first) {
  AttentionResults results{*out, stats, first};
  return params->logit ? Forward<true>::run(*params, results) : Forward<false>::run(*params, results);
}
