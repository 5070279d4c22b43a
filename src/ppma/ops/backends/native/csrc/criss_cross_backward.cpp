// Gradients of criss-cross attention. With the maps R of the rows and C of the columns, and Z = C v, Y = R v:
//
//   out = R Z + C Y (V2H + H2V),  dZ = R^T dout,  dY = C^T dout,  dv = C^T dZ + R^T dY,
//   dR = dout Z^T + dY v^T,  dC = dout Y^T + dZ v^T.
//
// Three passes over the lines: rows (Y, dZ), columns (Z, dY and all that depends on C), rows (all that depends on R). Maps
// are computed again where they are needed, so that nothing larger than the tokens is kept.
#include "line_map.h"
#include "parallel.h"
#include "problem.h"

using namespace ppma;

namespace {

// The memory that one thread needs for a line.
struct OwnScratch {
  float *softmax, *weights, *gradient;  // n x n
  float *values, *grad_out;             // n x dv
  float* transposed;                    // dv x n
  float* keys;                          // n x d
  float* potentials;                    // n
  LineScratch line;

  OwnScratch(Arena& arena, const Problem& problem, int64_t n)
      : softmax(arena.take(n * padded(n))),
        weights(problem.logit ? softmax : arena.take(n * padded(n))),
        gradient(arena.take(n * padded(n))),
        values(arena.take(n * padded(problem.dv))),
        grad_out(arena.take(n * padded(problem.dv))),
        transposed(arena.take(problem.dv * padded(n))),
        keys(arena.take(n * padded(problem.d))),
        potentials(arena.take(padded(n))),
        line(arena, n, problem.d) {}
};

// The memory of one head, shared by the threads that work on it: Z, Y and their gradients, tokens x dv.
struct HeadScratch {
  float *after_columns, *after_rows, *grad_after_columns, *grad_after_rows;

  HeadScratch(Arena& arena, const Problem& problem)
      : after_columns(arena.take(problem.tokens() * padded(problem.dv))),
        after_rows(arena.take(problem.tokens() * padded(problem.dv))),
        grad_after_columns(arena.take(problem.tokens() * padded(problem.dv))),
        grad_after_rows(arena.take(problem.tokens() * padded(problem.dv))) {}
};

template <bool kLogit>
class Backward {
 public:
  Backward(const Problem& problem, const Gradients& gradients, int64_t task, Arena head, Arena own)
      : problem_(problem),
        gradients_(gradients),
        task_(task),
        channels_(padded(problem.dv)),
        head_(head, problem),
        own_(own, problem, problem.longest_line()) {}

  void run(Team team) {
    team.share(problem_.height, [&](int64_t i) { first_rows(line_at(true, i)); });
    team.barrier();
    team.share(problem_.width, [&](int64_t j) { columns(line_at(false, j)); });
    team.barrier();
    team.share(problem_.height, [&](int64_t i) { last_rows(line_at(true, i)); });
  }

 private:
  Line line_at(bool row, int64_t index) const {
    return {problem_, task_ / problem_.heads, task_ % problem_.heads, row, index};
  }

  // Computes the map of a line, packs its values and the gradient of its output.
  void begin(const Line& line) {
    line_map_and_softmax<kLogit>(line, own_.line, own_.softmax, own_.weights);
    Tokens v = line.of(problem_.v), grad = line.of(gradients_.out);
    pack_rows(v.data, v.stride, line.size(), problem_.dv, own_.values);
    pack_rows(grad.data, grad.stride, line.size(), problem_.dv, own_.grad_out);
  }

  void first_rows(const Line& line) {
    begin(line);
    if (problem_.h2v) apply(line, packed(own_.values), line.of(head_.after_rows, channels_));
    if (problem_.v2h)
      apply_transposed(line, packed(own_.grad_out), line.of(head_.grad_after_columns, channels_), channels_,
                       problem_.path_weight(), false);
  }

  void columns(const Line& line) {
    begin(line);
    Tokens grad_inner = line.of(head_.grad_after_columns, channels_);
    if (problem_.h2v) {
      apply_transposed(line, packed(own_.grad_out), line.of(head_.grad_after_rows, channels_), channels_,
                       problem_.path_weight(), false);
      add_outer(line, packed(own_.grad_out), line.of(head_.after_rows, channels_), problem_.path_weight(), false);
    }
    if (problem_.v2h) {
      apply(line, packed(own_.values), line.of(head_.after_columns, channels_));
      apply_transposed(line, grad_inner, line.of(gradients_.v), problem_.dv, 1.0f, false);
      add_outer(line, grad_inner, packed(own_.values), 1.0f, problem_.h2v);
    }
    finish(line, gradients_.log_beta, false);
  }

  void last_rows(const Line& line) {
    begin(line);
    Tokens grad_inner = line.of(head_.grad_after_rows, channels_);
    if (problem_.v2h)
      add_outer(line, packed(own_.grad_out), line.of(head_.after_columns, channels_), problem_.path_weight(), false);
    if (problem_.h2v) {
      apply_transposed(line, grad_inner, line.of(gradients_.v), problem_.dv, 1.0f, problem_.v2h);
      add_outer(line, grad_inner, packed(own_.values), 1.0f, problem_.v2h);
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
    pack_columns(from.data, from.stride, n, problem_.dv, factor, own_.transposed, width);
    product(rows_of(grad.data, grad.stride), {own_.transposed, width}, n, width, problem_.dv,
            Store{own_.gradient, width, add});
  }

  // From the gradient of the map to those of queries, keys and log-decays.
  void finish(const Line& line, const View& grad_log_decay, bool add) {
    int64_t n = line.size(), width = padded(n), d = problem_.d;
    line_map_backward<kLogit>(line, own_.softmax, own_.weights, own_.gradient, own_.potentials, grad_log_decay);
    Tokens k = line.of(problem_.k), grad_q = line.of(gradients_.q), grad_k = line.of(gradients_.k);
    pack_rows(k.data, k.stride, n, d, own_.keys);
    product(rows_of(own_.gradient, width), {own_.keys, padded(d)}, n, padded(d), n,
            ScaledStore{grad_q.data, grad_q.stride, d, nullptr, problem_.scale, add});
    product(columns_of(own_.gradient, width), {own_.line.queries, padded(d)}, n, padded(d), n,
            ScaledStore{grad_k.data, grad_k.stride, d, nullptr, problem_.scale, add});
  }

  const Problem& problem_;
  const Gradients& gradients_;
  int64_t task_;
  int64_t channels_;
  HeadScratch head_;
  OwnScratch own_;
};

template <bool kLogit>
int backward(const Problem& problem, const Gradients& gradients) {
  return for_tasks(problem.batch * problem.heads, problem.longest_line(), problem.threads, floats_of<HeadScratch>(problem),
                   floats_of<OwnScratch>(problem, problem.longest_line()),
                   [&](int64_t task, Team team, float* head, float* own) {
                     Backward<kLogit>(problem, gradients, task, Arena(head), Arena(own)).run(team);
                   });
}

}  // namespace

PPMA_EXPORT int ppma_criss_cross_attention_backward(const Problem* problem, const Gradients* gradients) {
  return problem->logit ? backward<true>(*problem, *gradients) : backward<false>(*problem, *gradients);
}
