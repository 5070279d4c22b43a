// Full attention by tiles: a block of queries against a tile of keys, both runs of tokens in raster order, either
// whole rows of the grid or a part of one row.
//
// For query row i and key row k, with the decay matrices A_i and A_k of these rows and ONE vector g of the decays
// between them in every column, the masks are
//
//   V2H[j][l] = A_i[j][l] g[l],   H2V[j][l] = g[j] A_k[j][l].
#pragma once

#include <cstdint>

#include "decay_matrix.h"
#include "parallel.h"
#include "params.h"
#include "product.h"
#include "simd.h"

namespace ppma {

// Tokens (row + r, column + c) for r < rows and c < columns; all columns of the grid if rows > 1.
struct Run {
  int64_t row, rows;
  int64_t column, columns;

  int64_t tokens() const { return rows * columns; }
};

// Cuts the grid into runs of at most `most` tokens and nearly equal size.
class Runs {
 public:
  Runs(int64_t height, int64_t width, int64_t most)
      : height_(height),
        width_(width),
        parts_((width + most - 1) / most),
        groups_(parts_ > 1 ? height : (height + most / width - 1) / (most / width)) {}

  int64_t parts() const { return parts_; }    // of a row
  int64_t groups() const { return groups_; }  // of rows
  int64_t count() const { return parts_ * groups_; }

  Run at(int64_t group, int64_t part) const {
    int64_t row = height_ * group / groups_, column = width_ * part / parts_;
    return {row, height_ * (group + 1) / groups_ - row, column, width_ * (part + 1) / parts_ - column};
  }

  // The largest number of rows, columns and tokens of any run.
  int64_t most_rows() const { return (height_ + groups_ - 1) / groups_; }
  int64_t most_columns() const { return (width_ + parts_ - 1) / parts_; }
  int64_t most_tokens() const { return most_rows() * most_columns(); }

 private:
  int64_t height_, width_;
  int64_t parts_, groups_;
};

// About a hundred queries share a tile of keys, which then stays in the nearest caches with its scores.
constexpr int64_t kQueryTokens = 100;
constexpr int64_t kKeyTokens = 200;

inline Runs query_runs(const AttentionParams& params) { return {params.height, params.width, kQueryTokens}; }
inline Runs key_runs(const AttentionParams& params) { return {params.height, params.width, kKeyTokens}; }

// Whether each query has two softmaxes, one for each path.
inline bool has_two_softmaxes(const AttentionParams& params) { return params.logit && params.v2h && params.h2v; }

// Whether the backward pass needs the output of the first of two softmaxes. With all keys in one tile it does not: it has
// the weights and the gradients of a whole row at hand, and what it would compute from that output is their product.
inline bool saves_first_output(const AttentionParams& params) {
  return has_two_softmaxes(params) && key_runs(params).count() > 1;
}

// Scores are stored without gaps between key rows. A row of them has room for a whole vector behind any key.
inline int64_t score_stride(int64_t keys) { return padded(keys) + kLanes; }

// One head.
struct Head {
  const AttentionParams& params;
  int64_t batch, head;

  const float* at(const View& view, int64_t i, int64_t j) const { return view.at(batch, head, i, j); }

  // Copies the channels of a run to padded rows.
  void pack(const View& view, int64_t channels, const Run& run, float* to) const {
    each_stretch(view, run, [&](const float* from, int64_t first, int64_t count) {
      pack_rows(from, view.stride[3], count, channels, to + first * padded(channels));
    });
  }

  // Copies the transpose of a run, times `scale`.
  void pack_transposed(const View& view, int64_t channels, const Run& run, float scale, float* to, int64_t stride) const {
    each_stretch(view, run, [&](const float* from, int64_t first, int64_t count) {
      pack_columns(from, view.stride[3], count, channels, scale, to + first, stride);
    });
  }

 private:
  // Calls body(pointer, first token, number of tokens) for stretches of equally spaced tokens.
  template <class Body>
  void each_stretch(const View& view, const Run& run, Body body) const {
    bool one = run.rows == 1 || view.stride[2] == run.columns * view.stride[3];
    int64_t stretches = one ? 1 : run.rows, count = run.tokens() / stretches;
    for (int64_t r = 0; r < stretches; ++r) body(at(view, run.row + r, run.column), r * count, count);
  }
};

// The potentials of all lines of a head.
class GridPotentials {
 public:
  static int64_t size(const AttentionParams& params) {
    return params.height * Potentials::size(params.width) + ColumnPotentials::size(params.height, params.width);
  }

  GridPotentials(float* memory, const Head& head) : memory_(memory), head_(head) {}

  // Done by the team together; all wait until it is done. To base e for "logit", else to base 2.
  void fill(Team team);

  Potentials row(int64_t i) const { return {of_row(i), head_.params.width}; }
  ColumnPotentials columns() const {
    return {of_row(head_.params.height), head_.params.height, head_.params.width};
  }

 private:
  float* of_row(int64_t i) const { return memory_ + i * Potentials::size(head_.params.width); }

  float* memory_;
  Head head_;
};

// The scores (queries x keys, rows `score_stride` apart) of a block of packed queries and a tile of keys, which are packed
// to `keys_transposed` (d x keys) on the way.
//
// The backward pass subtracts the largest logit that the forward pass found, so both need the same bits: a difference of
// one unit in the last place of a logit of 1e8 is a factor of e^8. Hence this and `GridPotentials::fill` are compiled once,
// in attention_tiles.cpp, for both; inlined twice, their products and sums might be fused differently. From here to the
// exponential there are only sums, in the same order, which the compiler must leave alone.
void score_tile(const Head& head, const float* queries, int64_t count, const Run& keys, float* keys_transposed,
                float* scores);

// Scores up to this magnitude need no maximum: no exponential overflows, and against the token itself, whose mask is 1, no
// mask that underflows could count: exp(2 * 35) * 2^-126 < 2^-24.
constexpr float kSafeScore = 35.0f;

// The factors of the masks of one tile, or their natural logarithms if kLog, unless they are asked for as factors. Vectors
// behind the last column may be read, not used.
template <bool kLog>
class TileMask {
 public:
  TileMask(Arena& arena, const Runs& queries, const Runs& keys)
      : most_queries_(queries.most_columns()),
        width_(padded(keys.most_columns())),
        query_width_(padded(most_queries_)),
        key_rows_(keys.most_rows()),
        of_query_rows_(arena.take(queries.most_rows() * most_queries_ * width_)),
        of_key_rows_(arena.take(key_rows_ * most_queries_ * width_)),
        at_keys_(arena.take(queries.most_rows() * key_rows_ * width_)),
        at_queries_(arena.take(queries.most_rows() * key_rows_ * query_width_)) {}

  // For a block of queries and all keys in the same columns as `keys`.
  void begin(const GridPotentials& potentials, const Run& queries, const Run& keys, bool factors = !kLog) {
    for (int64_t r = 0; r < queries.rows; ++r)
      row_block(potentials.row(queries.row + r), queries, keys, of_query_rows_ + r * most_queries_ * width_, factors);
  }

  // For a tile of keys.
  void next(const GridPotentials& potentials, const Run& queries, const Run& keys, bool factors = !kLog) {
    for (int64_t t = 0; t < keys.rows; ++t)
      row_block(potentials.row(keys.row + t), queries, keys, of_key_rows_ + t * most_queries_ * width_, factors);
    ColumnPotentials columns = potentials.columns();
    for (int64_t r = 0; r < queries.rows; ++r) {
      for (int64_t t = 0; t < keys.rows; ++t) {
        int64_t i = queries.row + r, k = keys.row + t, pair = r * key_rows_ + t;
        between(columns, i, k, keys, at_keys_ + pair * width_, factors);
        between(columns, i, k, queries, at_queries_ + pair * query_width_, factors);
      }
    }
  }

  // Row j of A_i and of A_k, over the keys' columns; i is query row r, k is key row t.
  const float* of_query_row(int64_t r, int64_t j) const { return of_query_rows_ + (r * most_queries_ + j) * width_; }
  const float* of_key_row(int64_t t, int64_t j) const { return of_key_rows_ + (t * most_queries_ + j) * width_; }

  // g between them, over the keys' columns and over the queries' columns.
  const float* at_keys(int64_t r, int64_t t) const { return at_keys_ + (r * key_rows_ + t) * width_; }
  const float* at_queries(int64_t r, int64_t t) const { return at_queries_ + (r * key_rows_ + t) * query_width_; }

 private:
  void row_block(const Potentials& row, const Run& queries, const Run& keys, float* to, bool factors) const {
    auto fill = kLog ? log_decay_block : decay_block;
    fill(row, queries.column, queries.columns, keys.column, keys.columns, to, width_);
    if (!kLog || !factors) return;
    for (int64_t j = 0; j < queries.columns; ++j)
      for (int64_t l = 0; l < keys.columns; l += kLanes) store(to + j * width_ + l, exp(load(to + j * width_ + l)));
  }

  void between(const ColumnPotentials& columns, int64_t i, int64_t k, const Run& run, float* to, bool factors) const {
    for (int64_t c = 0; c < run.columns; c += kLanes) {
      Vec log = columns.log_decay(i, k, run.column + c);
      store(to + c, !factors ? log : kLog ? exp(log) : exp2(log));
    }
  }

  int64_t most_queries_, width_, query_width_, key_rows_;
  float *of_query_rows_, *of_key_rows_, *at_keys_, *at_queries_;
};

}  // namespace ppma
