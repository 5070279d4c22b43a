// Gradients of full attention, recomputing each tile once from the saved maxima and sums of its softmaxes.
//
// With P the softmax, G = dout v^T, L and Lt the masks of the two paths, delta = rowsum(dout * out):
//
//   "hadamard": X = P G L, Xt = P G Lt, dS = X + Xt - P delta, weights = P (L + Lt);
//   "logit", for each path's own P: X or Xt = P (G - delta), dS = X + Xt, weights = the sum of the P.
//
// X and Xt are the gradients of log L and log Lt. They reach the potentials of the rows' decays through the query's row
// (L) or the key's row (Lt), and those of the columns' decays at the key's column (L) or the query's column (Lt).
//
// A weight of exactly 1 leaves no room for others, and its score has the gradient 0. The formulas above leave the
// difference of two roundings of the same sum there, which a large key would multiply.
#include <algorithm>
#include <cmath>

#include "attention_tiles.h"
#include "lane_sums.h"

using namespace ppma;

namespace {

// The blocks of queries of a head are divided into chunks, each with its own sums for the keys, which are added in order
// at the end: so few heads still occupy many threads, and the bits do not depend on how many. The number of chunks
// depends on the shape alone.
constexpr int64_t kChunksAtLeast = 16;
constexpr int64_t kChunksOfHead = 8;

int64_t chunks_of(const AttentionParams& params) {
  int64_t heads = std::max<int64_t>(params.batch * params.heads, 1), blocks = query_runs(params).count();
  int64_t chunks = (kChunksAtLeast + heads - 1) / heads;
  if (chunks > kChunksOfHead) chunks = kChunksOfHead;
  return chunks < blocks ? chunks : blocks;
}

// What one chunk adds up.
struct ChunkSums {
  float *grad_k, *grad_v;         // tokens x d, tokens x dv; the first without the scale
  double *alpha, *beta;           // what the potentials of rows and columns receive

  ChunkSums(Arena& arena, const AttentionParams& params)
      : grad_k(arena.take(params.tokens() * padded(params.d))),
        grad_v(arena.take(params.tokens() * padded(params.dv))),
        alpha(reinterpret_cast<double*>(arena.take(2 * params.tokens()))),
        beta(reinterpret_cast<double*>(arena.take(2 * params.tokens()))) {}

  void clear(const AttentionParams& params) {
    std::memset(grad_k, 0, sizeof(float) * params.tokens() * padded(params.d));
    std::memset(grad_v, 0, sizeof(float) * params.tokens() * padded(params.dv));
    for (int64_t token = 0; token < params.tokens(); ++token) alpha[token] = beta[token] = 0.0;
  }
};

template <bool kLogit>
struct ThreadScratch {
  float *queries, *grad_out;      // queries x d, queries x dv
  float *keys, *keys_transposed;  // keys x d; d x keys
  float* values_transposed;       // dv x keys, times what a path counts
  float *scores, *grad_map;       // queries x keys: they become the weights and the gradient of the scores
  float *top[2], *inverse[2];     // of each query and softmax: the largest logit, and 1 / the sum of exp(logit - it)
  float* factor[2];               // inverse * exp(-top), where the mask has factors
  float* delta[2];
  float *of_query_rows, *of_key_rows;  // sums of X and Xt over the tiles' other rows, as the factors of TileMask
  float *at_keys, *at_queries;         // sums of X over a row's queries and of Xt over a row's keys
  float* of_queries;                   // query columns x key rows: the latter of one row of queries
  float* lanes;                        // key rows or query columns x kLanes: sums that are still to be added up
  float* down;                         // key columns: sums over a row's queries
  float* path_weights[2];              // key rows x key columns: of one query in each of two softmaxes
  TileMask<kLogit> mask;

  ThreadScratch(Arena& arena, const AttentionParams& params, const Runs& query_runs, const Runs& key_runs)
      : queries(arena.take(query_runs.most_tokens() * padded(params.d))),
        grad_out(arena.take(query_runs.most_tokens() * padded(params.dv))),
        keys(arena.take(key_runs.most_tokens() * padded(params.d))),
        keys_transposed(arena.take(params.d * score_stride(key_runs.most_tokens()))),
        values_transposed(arena.take(params.dv * score_stride(key_runs.most_tokens()))),
        scores(arena.take(query_runs.most_tokens() * score_stride(key_runs.most_tokens()))),
        grad_map(arena.take(query_runs.most_tokens() * score_stride(key_runs.most_tokens()))),
        top{arena.take(query_runs.most_tokens()), arena.take(query_runs.most_tokens())},
        inverse{arena.take(query_runs.most_tokens()), arena.take(query_runs.most_tokens())},
        factor{arena.take(query_runs.most_tokens()), arena.take(query_runs.most_tokens())},
        delta{arena.take(query_runs.most_tokens()), arena.take(query_runs.most_tokens())},
        of_query_rows(arena.take(query_runs.most_tokens() * padded(key_runs.most_columns()))),
        of_key_rows(arena.take(key_runs.most_rows() * query_runs.most_columns() * padded(key_runs.most_columns()))),
        at_keys(arena.take(query_runs.most_rows() * key_runs.most_rows() * padded(key_runs.most_columns()))),
        at_queries(arena.take(query_runs.most_rows() * key_runs.most_rows() * padded(query_runs.most_columns()))),
        of_queries(arena.take(query_runs.most_columns() * padded(key_runs.most_rows()))),
        lanes(arena.take(padded(std::max(key_runs.most_rows(), query_runs.most_columns())) * kLanes)),
        down(arena.take(padded(key_runs.most_columns()))),
        path_weights{arena.take(key_runs.most_rows() * padded(key_runs.most_columns())),
                     arena.take(key_runs.most_rows() * padded(key_runs.most_columns()))},
        mask(arena, query_runs, key_runs) {}
};

// What the forward pass saved.
struct Saved {
  const View& out;
  const float* stats;
  const float* first;
};

template <bool kLogit>
class Backward {
 public:
  static int run(const AttentionParams& params, const Gradients& gradients, const Saved& saved) {
    int64_t chunks = chunks_of(params);
    int64_t shared_floats = GridPotentials::size(params) + 16 + chunks * floats_of<ChunkSums>(params);
    int64_t own_floats = floats_of<ThreadScratch<kLogit>>(params, query_runs(params), key_runs(params));
    return for_tasks(params.batch * params.heads, chunks, params.threads, shared_floats, own_floats,
                     [&](int64_t task, Team team, float* shared, float* own) {
                       Backward(params, gradients, saved, task, Arena(shared), Arena(own)).run(team);
                     });
  }

 private:
  Backward(const AttentionParams& params, const Gradients& gradients, const Saved& saved, int64_t task, Arena shared, Arena own)
      : params_(params),
        gradients_(gradients),
        saved_(saved),
        head_{params, task / params.heads, task % params.heads},
        query_runs_(query_runs(params)),
        key_runs_(key_runs(params)),
        width_(padded(key_runs_.most_columns())),
        v2h_(params.v2h),
        h2v_(params.h2v),
        two_(has_two_softmaxes(params)),
        has_first_(saves_first_output(params)),
        weighs_first_(two_ && !has_first_),
        potentials_(shared.take(GridPotentials::size(params)), head_),
        chunk_memory_(shared),
        own_(own, params, query_runs_, key_runs_) {}

  ChunkSums chunk_sums(int64_t chunk) const {
    Arena arena = chunk_memory_;
    for (int64_t before = 0; before < chunk; ++before) ChunkSums(arena, params_);
    return {arena, params_};
  }

  void run(Team team) {
    potentials_.fill(team);
    int64_t chunks = chunks_of(params_), blocks = query_runs_.count();
    team.share(chunks, [&](int64_t chunk) {
      ChunkSums sums = chunk_sums(chunk);
      sums.clear(params_);
      for (int64_t index = blocks * chunk / chunks; index < blocks * (chunk + 1) / chunks; ++index)
        block(query_runs_.at(index / query_runs_.parts(), index % query_runs_.parts()), sums);
    });
    team.barrier();
    team.share(params_.height, [&](int64_t i) { finish_row(i, chunks); });
    team.barrier();  // finish_row has added up the chunks
    team.share(params_.width, [&](int64_t j) { finish_column(j); });
  }

  // All keys for a block of queries.
  void block(const Run& queries, ChunkSums& sums) {
    head_.pack(params_.q, params_.d, queries, own_.queries);
    head_.pack(gradients_.out, params_.dv, queries, own_.grad_out);
    begin_queries(queries);
    const bool factors = !kLogit || is_bounded(queries);
    for (int s = 0; weighs_first_ && factors && s < 2; ++s)
      for (int64_t query = 0; query < queries.tokens(); query += kLanes)
        store(own_.factor[s] + query, load(own_.inverse[s] + query) * exp_bounded(-load(own_.top[s] + query)));
    for (int64_t part = 0; part < key_runs_.parts(); ++part) {
      Run columns = key_runs_.at(0, part);
      if (v2h_) {
        own_.mask.begin(potentials_, queries, columns, factors);
        std::memset(own_.of_query_rows, 0, sizeof(float) * queries.tokens() * width_);
      }
      for (int64_t group = 0; group < key_runs_.groups(); ++group)
        tile(queries, key_runs_.at(group, part), part == 0 && group == 0, factors, sums);
      if (v2h_)
        for (int64_t r = 0; r < queries.rows; ++r)
          add_to_row(queries, columns, own_.of_query_rows + r * queries.columns * width_, queries.row + r, sums);
    }
  }

  // What the queries of a block need of their softmaxes.
  void begin_queries(const Run& queries) {
    int64_t all = params_.batch * params_.heads * params_.tokens(), dv = params_.dv;
    float weight = params_.path_weight();
    for (int64_t query = 0; query < queries.tokens(); ++query) {
      int64_t i = queries.row + query / queries.columns, j = queries.column + query % queries.columns;
      int64_t token = ((head_.batch * params_.heads + head_.head) * params_.height + i) * params_.width + j;
      const float* grad = own_.grad_out + query * padded(dv);
      for (int s = 0; s <= two_; ++s) {
        own_.top[s][query] = saved_.stats[2 * s * all + token];
        own_.inverse[s][query] = 1.0f / saved_.stats[(2 * s + 1) * all + token];
      }
      float with_out = dot(grad, head_.at(saved_.out, i, j), dv);
      own_.delta[0][query] = with_out;
      if (has_first_) split_delta(query, weight * dot(grad, saved_.first + token * dv, dv));
    }
  }

  // Divides delta, of out = (first + second) / 2, between the two softmaxes.
  void split_delta(int64_t query, float of_first) {
    own_.delta[1][query] = own_.delta[0][query] - of_first;
    own_.delta[0][query] = of_first;
  }

  static float dot(const float* a, const float* b, int64_t count) {
    Vec total{};
    for (int64_t c = 0; c < count; c += kLanes) {
      int here = count - c < kLanes ? static_cast<int>(count - c) : kLanes;
      total += load_lanes(a + c, here) * load_lanes(b + c, here);
    }
    return sum(total);
  }

  void tile(const Run& queries, const Run& keys, bool first, bool factors, ChunkSums& sums) {
    int64_t count = keys.tokens(), stride = score_stride(count), d = params_.d, dv = params_.dv;
    own_.mask.next(potentials_, queries, keys, factors);
    head_.pack(params_.k, d, keys, own_.keys);
    head_.pack_transposed(params_.v, dv, keys, params_.path_weight(), own_.values_transposed, stride);
    score_tile(head_, own_.queries, queries.tokens(), keys, own_.keys_transposed, own_.scores);
    product(rows_of(own_.grad_out, padded(dv)), {own_.values_transposed, stride}, queries.tokens(), padded(count), dv,
            Store{own_.grad_map, stride});
    int64_t vectors = v2h_ && h2v_ ? padded(keys.columns) / kLanes : 0;
    for (int64_t r = 0; r < queries.rows; ++r) {
      for (int64_t j = 0; j < queries.columns; ++j) {
        int64_t query = r * queries.columns + j;
        if (kLogit && weighs_first_) {
          if (factors)
            vectors == 1 ? weigh<true, 1>(r, j, query, keys, stride) : weigh<true, 0>(r, j, query, keys, stride);
          else
            weigh<false, 0>(r, j, query, keys, stride);
          differentiate_of<kLogit>(vectors, r, j, queries, keys, stride);
        } else {
          differentiate_of<false>(vectors, r, j, queries, keys, stride);
        }
      }
      if (h2v_)
        pack_columns(own_.of_queries, padded(keys.rows), queries.columns, keys.rows, 1.0f,
                     own_.at_queries + r * keys.rows * padded(queries.columns), padded(queries.columns));
    }

    int64_t token = keys.row * params_.width + keys.column;
    product(columns_of(own_.scores, stride), {own_.grad_out, padded(dv)}, count, padded(dv), queries.tokens(),
            Store{sums.grad_v + token * padded(dv), padded(dv), true});
    product(columns_of(own_.grad_map, stride), {own_.queries, padded(d)}, count, padded(d), queries.tokens(),
            Store{sums.grad_k + token * padded(d), padded(d), true});
    Tokens grad_q{gradients_.q.at(head_.batch, head_.head, queries.row, queries.column), gradients_.q.stride[3]};
    product(rows_of(own_.grad_map, stride), {own_.keys, padded(d)}, queries.tokens(), padded(d), count,
            ScaledStore{grad_q.data, grad_q.stride, d, nullptr, params_.scale, !first});
    if (h2v_)
      for (int64_t t = 0; t < keys.rows; ++t)
        add_to_row(queries, keys, own_.of_key_rows + t * queries.columns * width_, keys.row + t, sums);
    add_to_columns(queries, keys, sums);
  }

  // Whether the masks of a block of queries may be factors in "logit": both paths then share one exponential. Where a
  // weight is exactly 1, so it must come out here, which only the logarithms promise.
  bool is_bounded(const Run& queries) const {
    if (!weighs_first_ || params_.key_bias) return false;
    float of_queries = 0.0f, of_keys = 0.0f;
    auto keep_larger = [](float& most, float square) {
      if (!(square <= most)) most = square;  // keeps NaN
    };
    for (int64_t query = 0; query < queries.tokens(); ++query) {
      if (own_.inverse[0][query] == 1.0f || own_.inverse[1][query] == 1.0f) return false;
      const float* q = own_.queries + query * padded(params_.d);
      keep_larger(of_queries, dot(q, q, params_.d));
    }
    for (int64_t token = 0; token < params_.tokens(); ++token) {
      const float* k = head_.at(params_.k, token / params_.width, token % params_.width);
      keep_larger(of_keys, dot(k, k, params_.d));
    }
    return std::sqrt(of_queries) * std::sqrt(of_keys) * std::fabs(params_.scale) <= kSafeScore;
  }

  // The weights of a query in both of two softmaxes, and the product of the first with the gradient of the map, which
  // divides delta. All keys are in this tile. kFactors: the mask has factors and not their logarithms. kVectors: of a key
  // row; 0 for any number.
  template <bool kFactors, int kVectors>
  void weigh(int64_t r, int64_t j, int64_t query, const Run& keys, int64_t stride) {
    const TileMask<kLogit> mask = own_.mask;  // this and the pointers are copies, which no store can change
    const float *scores = own_.scores + query * stride, *grad_map = own_.grad_map + query * stride;
    const float* of_query_row = mask.of_query_row(r, j);
    const float top[2] = {own_.top[0][query], own_.top[1][query]};
    float* const* scale = kFactors ? own_.factor : own_.inverse;
    const float inverse[2] = {scale[0][query], scale[1][query]};
    float *first = own_.path_weights[0], *second = own_.path_weights[1];
    const int64_t rows = keys.rows, columns = keys.columns, width = width_;
    Vec delta{};
    for (int64_t t = 0; t < rows; ++t) {
      const float *at_keys = mask.at_keys(r, t), *of_key_row = mask.of_key_row(t, j);
      const float at_query = mask.at_queries(r, t)[j];
      for (int64_t l = 0; l < (kVectors ? kVectors * kLanes : columns); l += kLanes) {
        const int64_t at = t * columns + l;
        Vec score = load(scores + at), p[2];
        if (kFactors) {
          Vec e = exp2_bounded(score * kLog2E);
          p[0] = e * (load(of_query_row + l) * load(at_keys + l)) * inverse[0];
          p[1] = e * load(of_key_row + l) * (at_query * inverse[1]);
        } else {
          p[0] = path_weights(score, load(of_query_row + l) + load(at_keys + l), top[0], inverse[0]);
          p[1] = path_weights(score, load(of_key_row + l) + at_query, top[1], inverse[1]);
        }
        store(first + t * width + l, p[0]);
        store(second + t * width + l, p[1]);
        IntVec inside = lane_index() < static_cast<int>(columns - l);
        delta += select(inside, p[0] * load(grad_map + at), Vec{});
      }
    }
    split_delta(query, sum(delta));
  }

  static Vec path_weights(Vec score, Vec log_mask, float top, float inverse) {
    return exp_weight(score + log_mask - top) * inverse;
  }

  // Calls `differentiate` for so many vectors of a key row, with both paths; 0 for any number and any paths.
  template <bool kGiven>
  void differentiate_of(int64_t vectors, int64_t r, int64_t j, const Run& queries, const Run& keys, int64_t stride) {
    const int64_t query = r * queries.columns + j;
    if (own_.inverse[0][query] == 1.0f || own_.inverse[two_][query] == 1.0f)
      differentiate<true, 0, kGiven>(r, j, queries, keys, stride);
    else if (vectors == 1)
      differentiate<false, 1, kGiven>(r, j, queries, keys, stride);
    else if (vectors == 2)
      differentiate<false, 2, kGiven>(r, j, queries, keys, stride);
    else
      differentiate<false, 0, kGiven>(r, j, queries, keys, stride);
  }

  // For the query of row r and column j of a block: from score and gradient of the map to weight and gradient of the
  // score, and the sums of X and Xt. `kCertain`: there may be a weight of exactly 1. `kVectors`: as above; what does not
  // change from key row to key row then stays in registers. `kGiven`: `weigh` has left the weights of both paths.
  template <bool kCertain, int kVectors, bool kGiven>
  void differentiate(int64_t r, int64_t j, const Run& queries, const Run& keys, int64_t stride) {
    constexpr int kHeld = kVectors > 0 ? kVectors : 1;
    const bool v2h = kVectors > 0 || v2h_, h2v = kVectors > 0 || h2v_;
    const int64_t query = r * queries.columns + j, rows = keys.rows, columns = keys.columns, width = width_;
    const TileMask<kLogit> mask = own_.mask;  // this and the pointers are copies, which no store can change
    const float *of_query_row = mask.of_query_row(r, j), *first = own_.path_weights[0], *second = own_.path_weights[1];
    float* sum_of_query_row = own_.of_query_rows + query * width;
    const float top[2] = {own_.top[0][query], own_.top[two_][query]};
    const float inverse[2] = {own_.inverse[0][query], own_.inverse[two_][query]}, weight_of_path = params_.path_weight();
    const float delta[2] = {own_.delta[0][query], own_.delta[two_][query]};
    Vec held_mask[kHeld], held_sum[kHeld];
    for (int n = 0; n < kVectors; ++n)
      held_mask[n] = load(of_query_row + n * kLanes), held_sum[n] = load(sum_of_query_row + n * kLanes);
    // Loaded before the vector in front of it is stored, whose last lanes may be its first: a load of what has just been
    // stored in part waits for the store.
    Vec next_score = load(own_.scores + query * stride), next_grad = load(own_.grad_map + query * stride);
    float *scores = own_.scores + query * stride, *grad_map = own_.grad_map + query * stride;
    float *lanes = own_.lanes, *sum_of_key_row = own_.of_key_rows + j * width;
    float* sum_at_keys = own_.at_keys + r * rows * width;
    const int64_t next_key_row = queries.columns * width;
    for (int64_t t = 0; t < rows; ++t) {
      const float *of_key_row = mask.of_key_row(t, j), *at_keys = mask.at_keys(r, t);
      const float at_query = kGiven ? 0.0f : mask.at_queries(r, t)[j];
      Vec at_this_query{};
      auto vector = [&](int64_t l, const Vec& mask_of_query_row, Vec& sum) {
        IntVec inside = lane_index() < static_cast<int>(columns - l);
        Vec score = next_score, grad = next_grad, x{}, xt{}, weight{}, grad_score;
        int64_t next = std::min(l + kLanes, columns);
        next_score = load(scores + next), next_grad = load(grad_map + next);
        if (kLogit) {
          if (v2h) {
            Vec p = kGiven ? load(first + l)
                           : path_weights(score, mask_of_query_row + load(at_keys + l), top[0], inverse[0]);
            x = select(kCertain ? inside & (p != 1.0f) : inside, p * (grad - delta[0]), Vec{});
            weight += p * weight_of_path;
          }
          if (h2v) {
            Vec p = kGiven ? load(second + l)
                           : path_weights(score, load(of_key_row + l) + at_query, top[1], inverse[1]);
            xt = select(kCertain ? inside & (p != 1.0f) : inside, p * (grad - delta[1]), Vec{});
            weight += p * weight_of_path;
          }
          grad_score = x + xt;
        } else {
          Vec p = exp_weight(score - top[0]) * inverse[0];
          Vec of_v2h = v2h ? mask_of_query_row * load(at_keys + l) : Vec{};
          Vec of_h2v = h2v ? load(of_key_row + l) * at_query : Vec{};
          Vec weighted = select(inside, p * grad, Vec{});
          x = weighted * of_v2h;
          xt = weighted * of_h2v;
          weight = p * (of_v2h + of_h2v);
          grad_score = x + xt - p * delta[0];
          if (kCertain) grad_score = select(p != 1.0f, grad_score, Vec{});
        }
        store(scores + l, select(inside, weight, score));
        store(grad_map + l, select(inside, grad_score, grad));
        if (v2h) {
          sum += x;
          store(sum_at_keys + l, j == 0 ? x : load(sum_at_keys + l) + x);
        }
        if (h2v) {
          store(sum_of_key_row + l, r == 0 ? xt : load(sum_of_key_row + l) + xt);
          at_this_query += xt;
        }
      };
      if (kVectors > 0) {
#pragma GCC unroll 2
        for (int n = 0; n < kHeld; ++n) vector(n * kLanes, held_mask[n], held_sum[n]);
      } else {
        for (int64_t l = 0; l < columns; l += kLanes) {
          Vec sum = v2h ? load(sum_of_query_row + l) : Vec{};
          vector(l, v2h ? load(of_query_row + l) : Vec{}, sum);
          if (v2h) store(sum_of_query_row + l, sum);
        }
      }
      store(lanes + t * kLanes, at_this_query);
      scores += columns, grad_map += columns, first += width, second += width;
      sum_of_key_row += next_key_row, sum_at_keys += width;
    }
    for (int n = 0; n < kVectors; ++n) store(sum_of_query_row + n * kLanes, held_sum[n]);
    float* of_query = own_.of_queries + j * padded(rows);
    for (int64_t t = 0; h2v && t < rows; t += kLanes) store(of_query + t, sum_each(lanes + t * kLanes));
  }

  // The gradient of log A of one row of the grid, over the queries' and the keys' columns.
  void add_to_row(const Run& queries, const Run& keys, const float* gradient, int64_t row, ChunkSums& sums) {
    double* potentials = sums.alpha + row * params_.width;
    float *down = own_.down, *lanes = own_.lanes;
    std::fill(down, down + width_, 0.0f);
    for (int64_t j = 0; j < queries.columns; ++j) {
      Vec across{};
      for (int64_t l = 0; l < keys.columns; l += kLanes) {
        Vec moved = signed_by_position(load(gradient + j * width_ + l), queries.column + j, keys.column + l);
        store(down + l, load(down + l) + moved);
        across += moved;
      }
      store(lanes + j * kLanes, across);
    }
    for (int64_t l = 0; l < keys.columns; ++l) potentials[keys.column + l] += down[l];
    each_sum(queries.columns, [&](int64_t j, float across) { potentials[queries.column + j] -= across; });
  }

  // Calls body(index, sum) for the sums of the first `count` vectors in `lanes`.
  template <class Body>
  void each_sum(int64_t count, Body body) {
    for (int64_t first = 0; first < count; first += kLanes) {
      Vec sums = sum_each(own_.lanes + first * kLanes);
      for (int lane = 0; lane < kLanes && first + lane < count; ++lane) body(first + lane, sums[lane]);
    }
  }

  // The gradient of log g of all pairs of rows of a tile: the later row of a pair receives it, the earlier one loses it.
  void add_to_columns(const Run& queries, const Run& keys, ChunkSums& sums) {
    const bool together = v2h_ && h2v_ && queries.column == keys.column && queries.columns == keys.columns;
    for (int64_t r = 0; r < queries.rows; ++r) {
      for (int64_t t = 0; t < keys.rows; ++t) {
        const int64_t i = queries.row + r, k = keys.row + t, pair = r * keys.rows + t;
        if (i == k) continue;
        const float *of_keys = own_.at_keys + pair * width_, *of_queries = own_.at_queries + pair * padded(queries.columns);
        double* later = sums.beta + std::max(i, k) * params_.width;
        double* earlier = sums.beta + std::min(i, k) * params_.width;
        auto add = [=](int64_t column, int64_t count, auto gradient) {
#pragma GCC ivdep  // two rows
          for (int64_t c = 0; c < count; ++c) later[column + c] += gradient(c), earlier[column + c] -= gradient(c);
        };
        if (together) {
          add(keys.column, keys.columns, [=](int64_t c) { return double{of_keys[c]} + double{of_queries[c]}; });
        } else {
          if (v2h_) add(keys.column, keys.columns, [=](int64_t c) { return double{of_keys[c]}; });
          if (h2v_) add(queries.column, queries.columns, [=](int64_t c) { return double{of_queries[c]}; });
        }
      }
    }
  }

  // Adds up the chunks for one row of the grid, in order, and writes its gradients.
  void finish_row(int64_t i, int64_t chunks) {
    int64_t first_token = i * params_.width;
    ChunkSums sums = chunk_sums(0);
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      ChunkSums more = chunk_sums(chunk);
      add(sums.grad_k, more.grad_k, first_token * padded(params_.d), params_.width * padded(params_.d));
      add(sums.grad_v, more.grad_v, first_token * padded(params_.dv), params_.width * padded(params_.dv));
      add(sums.alpha, more.alpha, first_token, params_.width);
      add(sums.beta, more.beta, first_token, params_.width);
    }
    write_row(i, sums.grad_k, params_.d, params_.scale, gradients_.k);
    write_row(i, sums.grad_v, params_.dv, 1.0f, gradients_.v);
    log_decay_gradient(sums.alpha + first_token, 1, head_.at(params_.log_alpha, i, 0), params_.log_alpha.stride[3],
                       params_.width, gradients_.log_alpha.at(head_.batch, head_.head, i, 0),
                       gradients_.log_alpha.stride[3]);
  }

  void finish_column(int64_t j) {
    log_decay_gradient(chunk_sums(0).beta + j, params_.width, head_.at(params_.log_beta, 0, j),
                       params_.log_beta.stride[2], params_.height,
                       gradients_.log_beta.at(head_.batch, head_.head, 0, j), gradients_.log_beta.stride[2]);
  }

  template <class Float>
  static void add(Float* to, const Float* from, int64_t first, int64_t count) {
    for (int64_t at = first; at < first + count; ++at) to[at] += from[at];
  }

  void write_row(int64_t i, const float* from, int64_t channels, float scale, const View& view) {
    for (int64_t j = 0; j < params_.width; ++j) {
      float* to = view.at(head_.batch, head_.head, i, j);
      const float* token = from + (i * params_.width + j) * padded(channels);
      for (int64_t c = 0; c < channels; ++c) to[c] = scale * token[c];
    }
  }

  const AttentionParams& params_;
  const Gradients& gradients_;
  const Saved& saved_;
  Head head_;
  Runs query_runs_, key_runs_;
  const int64_t width_;
  const bool v2h_, h2v_;
  const bool two_;        // softmaxes
  const bool has_first_;  // the output of the first of them
  const bool weighs_first_;  // two softmaxes, whose weights a query has before its gradients
  GridPotentials potentials_;
  Arena chunk_memory_;
  ThreadScratch<kLogit> own_;
};

}  // namespace

PPMA_EXPORT int ppma_polyline_attention_backward(const AttentionParams* params, const Gradients* gradients, const View* out,
                                        const float* stats, const float* first) {
  Saved saved{*out, stats, first};
  return params->logit ? Backward<true>::run(*params, *gradients, saved)
                        : Backward<false>::run(*params, *gradients, saved);
}
