// Gradients of criss-cross attention. With the maps R of the rows and C of the columns, and Z = C v, Y = R v:
//
//   out = R Z + C Y (V2H + H2V),  dZ = R^T dout,  dY = C^T dout,  dv = C^T dZ + R^T dY,
//   dR = dout Z^T + dY v^T,  dC = dout Y^T + dZ v^T.
//
// Three passes over the lines: rows (Y, dZ), columns (Z, dY and all that depends on C), rows (all that depends on R). Maps
// are recomputed where they are needed, so that nothing larger than the tokens is kept.
#include "line_map.h"
#include "parallel.h"
#include "params.h"

using namespace ppma;

namespace {

// The memory that one thread needs for a line.
struct ThreadScratch {
  float *softmax, *weights, *gradient;  // n x n
  float *values, *grad_out;             // n x dv
  float* transposed;                    // dv x n
  float* keys;                          // n x d
  float* potentials;                    // n
  LineScratch line;

  ThreadScratch(Arena& arena, const AttentionParams& params, int64_t n)
      : softmax(arena.take(n * padded(n))),
        weights(params.logit ? softmax : arena.take(n * padded(n))),
        gradient(arena.take(n * padded(n))),
        values(arena.take(n * padded(params.dv))),
        grad_out(arena.take(n * padded(params.dv))),
        transposed(arena.take(params.dv * padded(n))),
        keys(arena.take(n * padded(params.d))),
        potentials(arena.take(padded(n))),
        line(arena, n, params.d) {}
};

// The memory of one head, shared by the threads that work on it: Z, Y and their gradients, tokens x dv.
struct HeadScratch {
  float *after_columns, *after_rows, *grad_after_columns, *grad_after_rows;

  HeadScratch(Arena& arena, const AttentionParams& params)
      : after_columns(arena.take(params.tokens() * padded(params.dv))),
        after_rows(arena.take(params.tokens() * padded(params.dv))),
        grad_after_columns(arena.take(params.tokens() * padded(params.dv))),
        grad_after_rows(arena.take(params.tokens() * padded(params.dv))) {}
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
    team.share(params_.height, [&](int64_t i) { last_rows(line_at(true, i)); });
  }

 private:
  Line line_at(bool row, int64_t index) const {
    return {params_, task_ / params_.heads, task_ % params_.heads, row, index};
  }

  // Computes the map of a line, packs its values and the gradient of its output.
  void begin(const Line& line) {
    line_map_and_softmax<kLogit>(line, own_.line, own_.softmax, own_.weights);
    Tokens v = line.of(params_.v), grad = line.of(gradients_.out);
    pack_rows(v.data, v.stride, line.size(), params_.dv, own_.values);
    pack_rows(grad.data, grad.stride, line.size(), params_.dv, own_.grad_out);
  }

  void first_rows(const Line& line) {
    begin(line);
    if (params_.h2v) apply(line, packed(own_.values), line.of(head_.after_rows, channels_));
    if (params_.v2h)
      apply_transposed(line, packed(own_.grad_out), line.of(head_.grad_after_columns, channels_), channels_,
                       params_.path_weight(), false);
  }

  void columns(const Line& line) {
    begin(line);
    Tokens grad_inner = line.of(head_.grad_after_columns, channels_);
    if (params_.h2v) {
      apply_transposed(line, packed(own_.grad_out), line.of(head_.grad_after_rows, channels_), channels_,
                       params_.path_weight(), false);
      add_outer(line, packed(own_.grad_out), line.of(head_.after_rows, channels_), params_.path_weight(), false);
    }
    if (params_.v2h) {
      apply(line, packed(own_.values), line.of(head_.after_columns, channels_));
      apply_transposed(line, grad_inner, line.of(gradients_.v), params_.dv, 1.0f, false);
      add_outer(line, grad_inner, packed(own_.values), 1.0f, params_.h2v);
    }
    finish(line, gradients_.log_beta, false);
  }

  void last_rows(const Line& line) {
    begin(line);
    Tokens grad_inner = line.of(head_.grad_after_rows, channels_);
    if (params_.v2h)
      add_outer(line, packed(own_.grad_out), line.of(head_.after_columns, channels_), params_.path_weight(), false);
    if (params_.h2v) {
      apply_transposed(line, grad_inner, line.of(gradients_.v), params_.dv, 1.0f, params_.v2h);
      add_outer(line, grad_inner, packed(own_.values), 1.0f, params_.v2h);
    }
    finish(line, gradients_.log_alpha, true);
  }

  Tokens packed(float* tokens) const { return {tokens, channels_}; }

  // to = map from
  void apply(const Line& line, Tokens from, Tokens to) {
    int64_t n = line.size();
    product(rows_of(own_.weights, padded(n)), {from.data, from.stride}, n, channels_, n, Store{to.data, to.stride});
  }

  // to = factor * map^T from
  void apply_transposed(const Line& line, Tokens from, Tokens to, int64_t columns, float factor, bool add) {
    int64_t n = line.size();
    product(columns_of(own_.weights, padded(n)), {from.data, from.stride}, n, channels_, n,
            ScaledStore{to.data, to.stride, columns, nullptr, factor, add});
  }

  // The gradient of a map that took `from` to tokens with the gradient `grad`: factor * grad from^T.
  void add_outer(const Line& line, Tokens grad, Tokens from, float factor, bool add) {
    int64_t n = line.size(), width = padded(n);
    pack_columns(from.data, from.stride, n, params_.dv, factor, own_.transposed, width);
    product(rows_of(grad.data, grad.stride), {own_.transposed, width}, n, width, params_.dv,
            Store{own_.gradient, width, add});
  }

  // From the gradient of the map to those of queries, keys and log-decays.
  void finish(const Line& line, const View& grad_log_decay, bool add) {
    int64_t n = line.size(), width = padded(n), d = params_.d;
    line_map_backward<kLogit>(line, own_.softmax, own_.weights, own_.gradient, own_.potentials, grad_log_decay);
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
