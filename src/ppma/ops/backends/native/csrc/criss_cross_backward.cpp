// Gradients of criss-cross attention. With the maps R of the rows and C of the columns, and Z = C v, Y = R v:
//
//   out = R Z + C Y (V2H + H2V),  dZ = R^T dout,  dY = C^T dout,  dv = C^T dZ + R^T dY,
//   dR = dout Z^T + dY v^T,  dC = dout Y^T + dZ v^T.
//
// Three passes over the lines: rows (Y, dZ), columns (Z, dY and all that depends on C), rows (all that depends on R). The
// maps of the rows are kept in between if they are small, and recomputed otherwise.
#include <algorithm>

#include "line_map.h"
#include "parallel.h"
#include "params.h"

using namespace ppma;

namespace {

// At most this many floats of a head's maps are kept.
constexpr int64_t kKeptFloats = 1 << 20;

// The softmax of a line of n tokens and the map that multiplies the values, n x n each: one and the same for "logit".
struct LineMaps {
  float *softmax, *weights;

  LineMaps(const AttentionParams& params, int64_t n, float* memory)
      : softmax(memory), weights(params.logit ? memory : memory + n * padded(n)) {}

  static int64_t size(const AttentionParams& params, int64_t n) { return (params.logit ? 1 : 2) * n * padded(n); }
};

// The memory that one thread needs for a line.
struct ThreadScratch {
  float* maps;                          // LineMaps
  float* gradient;                      // n x n
  float* values;                        // n x dv
  float* pairs;                         // n x (dv, dv): the gradient of the output, and that of Z or Y
  float* transposed;                    // (dv, dv) x n: what the map's gradient is the product of these with
  float* keys;                          // n x d
  float *potentials, *row_scale;        // n
  LineScratch line;

  ThreadScratch(Arena& arena, const AttentionParams& params, int64_t n)
      : maps(arena.take(LineMaps::size(params, n))),
        gradient(arena.take(n * padded(n))),
        values(arena.take(n * padded(params.dv))),
        pairs(arena.take(2 * n * padded(params.dv))),
        transposed(arena.take(2 * padded(params.dv) * padded(n))),
        keys(arena.take(n * padded(params.d))),
        potentials(arena.take(padded(n))),
        row_scale(arena.take(padded(n))),
        line(arena, n, params.d) {}
};

// The memory of one head, shared by the threads that work on it.
struct HeadScratch {
  float *after_columns, *after_rows, *grad_after_columns, *grad_after_rows;  // Z, Y and their gradients, tokens x dv
  int64_t kept_floats;                                                       // of each row's maps
  bool keeps_maps;
  float* row_maps;

  HeadScratch(Arena& arena, const AttentionParams& params)
      : after_columns(arena.take(params.tokens() * padded(params.dv))),
        after_rows(arena.take(params.tokens() * padded(params.dv))),
        grad_after_columns(arena.take(params.tokens() * padded(params.dv))),
        grad_after_rows(arena.take(params.tokens() * padded(params.dv))),
        kept_floats(LineMaps::size(params, params.width)),
        keeps_maps(kept_floats * params.height <= kKeptFloats),
        row_maps(arena.take(keeps_maps ? kept_floats * params.height : 0)) {}
};

// Two results of one product, side by side.
struct PairStore {
  ScaledStore first, second;
  int64_t split;  // the first column of the second

  void operator()(int64_t row, int64_t column, Vec x) const {
    if (column < split)
      first(row, column, x);
    else
      second(row, column - split, x);
  }
};

template <bool kLogit>
class Backward {
 public:
  Backward(const AttentionParams& params, const Gradients& gradients, int64_t task, Arena head, Arena own)
      : params_(params),
        gradients_(gradients),
        task_(task),
        channels_(padded(params.dv)),
        head_(head, params),
        own_(own, params, params.longest_line()) {}

  void run(Team team) {
    team.share(params_.height, [&](int64_t i) { first_rows(line_at(true, i)); });
    team.barrier();
    team.share(params_.width, [&](int64_t j) { columns(line_at(false, j)); });
    team.barrier();
    // Backwards: the maps that were kept last are in the nearest cache.
    team.share(params_.height, [&](int64_t done) { last_rows(line_at(true, params_.height - 1 - done)); });
  }

 private:
  Line line_at(bool row, int64_t index) const {
    return {params_, task_ / params_.heads, task_ % params_.heads, row, index};
  }

  // Computes the maps of a line or finds those kept, packs its values and the gradient of its output.
  LineMaps begin(const Line& line, bool kept = false) {
    bool keep = line.row && head_.keeps_maps;
    LineMaps maps(params_, line.size(), keep ? head_.row_maps + line.index * head_.kept_floats : own_.maps);
    if (keep && kept) {
      Tokens q = line.of(params_.q);
      pack_rows(q.data, q.stride, line.size(), params_.d, own_.line.queries);
    } else {
      line_map_and_softmax<kLogit>(line, own_.line, maps.softmax, maps.weights, own_.row_scale);
    }
    Tokens v = line.of(params_.v);
    pack_rows(v.data, v.stride, line.size(), params_.dv, own_.values);
    pack_pairs(line, line.of(gradients_.out), params_.dv, 0);
    return maps;
  }

  // Copies the channels of a line to the first or second half of the pairs.
  void pack_pairs(const Line& line, Tokens from, int64_t columns, int half) {
    pack_rows(from.data, from.stride, line.size(), columns, own_.pairs + half * channels_, 2 * channels_);
  }

  void first_rows(const Line& line) {
    LineMaps maps = begin(line);
    if (params_.h2v) apply(line, maps, line.of(head_.after_rows, channels_));
    if (params_.v2h) apply_transposed(line, maps, 0, 1, to_halfway(line, head_.grad_after_columns));
  }

  void columns(const Line& line) {
    LineMaps maps = begin(line);
    ScaledStore to_rows = to_halfway(line, head_.grad_after_rows), to_values = to_gradient(line, false);
    if (params_.v2h) {
      pack_pairs(line, line.of(head_.grad_after_columns, channels_), channels_, 1);
      apply(line, maps, line.of(head_.after_columns, channels_));
    }
    // Halves of one vector have too few sums to keep the processor busy, and go together.
    if (params_.v2h && params_.h2v && channels_ == kLanes) {
      apply_transposed(line, maps, 0, 2, PairStore{to_rows, to_values, channels_});
    } else {
      if (params_.h2v) apply_transposed(line, maps, 0, 1, to_rows);
      if (params_.v2h) apply_transposed(line, maps, 1, 1, to_values);
    }
    map_gradient(line, line.of(head_.after_rows, channels_), params_.h2v, params_.v2h);
    finish(line, maps, gradients_.log_beta, false);
  }

  void last_rows(const Line& line) {
    LineMaps maps = begin(line, true);
    if (params_.h2v) {
      pack_pairs(line, line.of(head_.grad_after_rows, channels_), channels_, 1);
      apply_transposed(line, maps, 1, 1, to_gradient(line, params_.v2h));
    }
    map_gradient(line, line.of(head_.after_columns, channels_), params_.v2h, params_.h2v);
    finish(line, maps, gradients_.log_alpha, true);
  }

  // To the gradients of Z or Y, and of the values.
  ScaledStore to_halfway(const Line& line, float* grid) const {
    Tokens to = line.of(grid, channels_);
    return {to.data, to.stride, channels_, nullptr, params_.path_weight(), false};
  }
  ScaledStore to_gradient(const Line& line, bool add) const {
    Tokens to = line.of(gradients_.v);
    return {to.data, to.stride, params_.dv, nullptr, 1.0f, add};
  }

  // to = map values
  void apply(const Line& line, const LineMaps& maps, Tokens to) {
    int64_t n = line.size();
    product(rows_of(maps.weights, padded(n)), {own_.values, channels_}, n, channels_, n, Store{to.data, to.stride});
  }

  // `results` takes map^T (a half of the pairs, or both from the first on).
  template <class Finish>
  void apply_transposed(const Line& line, const LineMaps& maps, int half, int halves, const Finish& results) {
    int64_t n = line.size();
    product(columns_of(maps.weights, padded(n)), {own_.pairs + half * channels_, 2 * channels_}, n, halves * channels_, n,
            results);
  }

  // The gradient of a map, one product for both paths: as the last of its path it made the output of `inner`; as the first
  // it made of the values what has the gradient in the second half of the pairs.
  void map_gradient(const Line& line, Tokens inner, bool as_last, bool as_first) {
    int64_t n = line.size(), width = padded(n), dv = params_.dv;
    float* second = own_.transposed + channels_ * width;
    if (as_last) pack_columns(inner.data, inner.stride, n, dv, params_.path_weight(), own_.transposed, width);
    if (as_first) pack_columns(own_.values, channels_, n, dv, 1.0f, second, width);
    // What pads the channels of the first half is 0 there, and must not meet a NaN here.
    if (as_last && as_first) std::fill(own_.transposed + dv * width, second, 0.0f);
    int64_t first = as_last ? 0 : channels_, depth = (as_first ? channels_ + dv : dv) - first;
    product(rows_of(own_.pairs + first, 2 * channels_), {own_.transposed + first * width, width}, n, width, depth,
            Store{own_.gradient, width});
  }

  // From the gradient of the map to those of queries, keys and log-decays.
  void finish(const Line& line, const LineMaps& maps, const View& grad_log_decay, bool add) {
    int64_t n = line.size(), width = padded(n), d = params_.d;
    line_map_backward<kLogit>(line, maps.softmax, maps.weights, own_.gradient, own_.potentials, grad_log_decay);
    Tokens k = line.of(params_.k), grad_q = line.of(gradients_.q), grad_k = line.of(gradients_.k);
    pack_rows(k.data, k.stride, n, d, own_.keys);
    product(rows_of(own_.gradient, width), {own_.keys, padded(d)}, n, padded(d), n,
            ScaledStore{grad_q.data, grad_q.stride, d, nullptr, params_.scale, add});
    product(columns_of(own_.gradient, width), {own_.line.queries, padded(d)}, n, padded(d), n,
            ScaledStore{grad_k.data, grad_k.stride, d, nullptr, params_.scale, add});
  }

  const AttentionParams& params_;
  const Gradients& gradients_;
  int64_t task_;
  int64_t channels_;
  HeadScratch head_;
  ThreadScratch own_;
};

template <bool kLogit>
int backward(const AttentionParams& params, const Gradients& gradients) {
  return for_tasks(params.batch * params.heads, params.longest_line(), params.threads, floats_of<HeadScratch>(params),
                   floats_of<ThreadScratch>(params, params.longest_line()),
                   [&](int64_t task, Team team, float* head, float* own) {
                     Backward<kLogit>(params, gradients, task, Arena(head), Arena(own)).run(team);
                   });
}

}  // namespace

PPMA_EXPORT int ppma_criss_cross_attention_backward(const AttentionParams* params, const Gradients* gradients) {
  return params->logit ? backward<true>(*params, *gradients) : backward<false>(*params, *gradients);
}
