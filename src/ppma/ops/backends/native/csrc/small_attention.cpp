// Full attention on small grids: a few queries at a time against all keys.
//
// With all scores of a query at hand, its softmax needs no running maximum, and both paths share one exponential and one
// product with the values: with E = exp(s - top) and the masks M1, M2 in linear form,
//
//   out = sum over keys of E (c1 M1 + c2 M2) v,
//
// where c1 = c2 = 1 / sum E ("hadamard") or c = 1 / (2 sum E M) for each path ("logit"). Where a masked sum is so small
// that masks may have underflowed, the query's row is computed again with the logarithms of the masks.
//
// A backward pass computes the weights again from scores that must agree with these to a rounding of the weight. They do
// while scores are small; heads with larger ones are left to another kernel. On grids where it needs the output of the
// first of two paths, the paths have a product each.
//
// Key rows are padded to whole vectors, or to a power of two so that several rows share a vector.
#include "small_attention.h"

#include <algorithm>
#include <cmath>

#include "attention_tiles.h"

using namespace ppma;

namespace {

constexpr int64_t kMostTokens = 1024;
constexpr int kMostVectors = 4;  // of a key row
constexpr int64_t kPanel = kBlockVectors * kLanes;
// Below this share of the largest weight the logarithms are used. It bounds the error of exp_weight, which grows with the
// distance from the largest score.
constexpr float kLeastSum = 0x1p-20f;

// The padded grid of keys.
struct Keys {
  int64_t height, width;
  int64_t stride;  // from one key row to the next
  int64_t count;   // with all padding, a multiple of kPanel

  explicit Keys(const AttentionParams& params) : height(params.height), width(params.width), stride(padded(width)) {
    if (width <= kLanes / 2)
      for (stride = 1; stride < width;) stride *= 2;
    count = (height * stride + kPanel - 1) / kPanel * kPanel;
  }
  int64_t rows_of_vector() const { return stride < kLanes ? kLanes / stride : 1; }
  int64_t height_in(int64_t rows) const { return (height + rows - 1) / rows; }
};

// What the threads that work on one head share.
struct HeadTables {
  float* keys;         // [panel][d][key of the panel]; 0 in the padding
  float* values;       // [token][dv]
  float* rows;         // A: [j][i][l], the decay between (i, j) and (i, l); 0 in the padding
  float* columns;      // g: [i][k][l], the decay between (i, l) and (k, l)
  float* inside;       // [k][l]: 1, or 0 in the padding
  float* potentials;   // GridPotentials
  float* key_norms;    // the largest of each panel
  float* query_norms;  // the largest of each row; only for a backward pass

  HeadTables(Arena& arena, const AttentionParams& params, const Keys& grid)
      : keys(arena.take(params.d * grid.count)),
        values(arena.take(params.tokens() * padded(params.dv))),
        rows(arena.take(grid.width * grid.count + kLanes)),
        columns(arena.take(grid.height * grid.count + kLanes)),
        inside(arena.take(grid.count)),
        potentials(arena.take(GridPotentials::size(params))),
        key_norms(arena.take(grid.count / kPanel)),
        query_norms(arena.take(grid.height)) {}
};

struct QueryScratch {
  float* queries;     // kBlockRows x d
  float* scores;      // kBlockRows x keys, then their exponentials
  float* weights[2];  // kBlockRows x tokens, of one product with the values each: the padding is gone
  float* panel;       // the scores of one query against one panel of keys
  float* row_scale;   // kBlockRows: by what the weights of a query are still to be multiplied

  QueryScratch(Arena& arena, const AttentionParams& params, const Keys& grid)
      : queries(arena.take(kBlockRows * padded(params.d))),
        scores(arena.take(kBlockRows * grid.count + kLanes)),
        weights{arena.take(kBlockRows * weight_stride(grid)), arena.take(kBlockRows * weight_stride(grid))},
        panel(arena.take(kPanel)),
        row_scale(arena.take(kBlockRows)) {}

  // Whole vectors are stored, also of the rows that fill up the last one.
  static int64_t weight_stride(const Keys& grid) {
    return padded((grid.height + grid.rows_of_vector()) * grid.width) + kLanes;
  }
};

class Small {
 public:
  Small(const AttentionParams& params, const AttentionResults& results, const Keys& grid, int64_t task, Arena shared, Arena own)
      : params_(params),
        results_(results),
        grid_(grid),
        separate_(results.stats && saves_first_output(params)),
        head_{params, task / params.heads, task % params.heads},
        tables_(shared, params, grid),
        potentials_(tables_.potentials, head_),
        own_(own, params, grid) {}

  // Whether every score of the head is small; the same for the whole team, which waits for each other.
  bool prepare(Team team) {
    potentials_.fill(team);
    team.share(grid_.height, [&](int64_t i) { fill_row(i); });
    team.share(grid_.count / kPanel, [&](int64_t panel) { pack_panel(panel); });
    team.barrier();
    auto largest_of = [](const float* norms, int64_t count) {
      float most = 0.0f;
      for (int64_t n = 0; n < count; ++n)
        if (!(norms[n] <= most)) most = norms[n];  // keeps NaN
      return most;
    };
    key_norm_ = largest_of(tables_.key_norms, grid_.count / kPanel);
    bool safe = is_safe(largest_of(tables_.query_norms, grid_.height));
    team.barrier();
    return safe;
  }

  void run(Team team) {
    int64_t tokens = params_.tokens(), blocks = (tokens + kBlockRows - 1) / kBlockRows;
    team.share(blocks, [&](int64_t block) {
      int64_t first = tokens * block / blocks;
      attend(first, tokens * (block + 1) / blocks - first);
    });
  }

 private:
  bool is_safe(float query_norm) const { return query_norm * key_norm_ * std::fabs(params_.scale) <= kSafeScore; }

  // The tables of grid row i, its values, and the norm of its queries.
  void fill_row(int64_t i) {
    Potentials row = potentials_.row(i);
    ColumnPotentials columns = potentials_.columns();
    auto decay = [&](Vec log) { return params_.logit ? exp(log) : exp2(log); };
    auto write = [&](float* to, auto log) {
      for (int64_t l = 0; l < grid_.stride; l += kLanes) {
        Vec row_of_mask = select(lane_index() < static_cast<int>(grid_.width - l), decay(log(l)), Vec{});
        if (grid_.stride >= kLanes)
          store(to + l, row_of_mask);
        else
          store_part(to, row_of_mask, static_cast<int>(grid_.stride));
      }
    };
    for (int64_t j = 0; j < grid_.width; ++j)
      write(tables_.rows + j * grid_.count + i * grid_.stride, [&](int64_t l) { return row.log_decay(j, l); });
    for (int64_t k = 0; k < grid_.height; ++k)
      write(tables_.columns + i * grid_.count + k * grid_.stride, [&](int64_t l) { return columns.log_decay(i, k, l); });
    for (int64_t l = 0; l < grid_.stride; ++l) tables_.inside[i * grid_.stride + l] = l < grid_.width;
    if (i + 1 == grid_.height) {  // the rows that fill up the last panel
      for (int64_t at = grid_.height * grid_.stride; at < grid_.count; ++at) {
        for (int64_t j = 0; j < grid_.width; ++j) tables_.rows[j * grid_.count + at] = 0.0f;
        for (int64_t k = 0; k < grid_.height; ++k) tables_.columns[k * grid_.count + at] = 0.0f;
        tables_.inside[at] = 0.0f;
      }
    }
    pack_rows(head_.at(params_.v, i, 0), params_.v.stride[3], grid_.width, params_.dv,
              tables_.values + i * grid_.width * padded(params_.dv));
    float most = 0.0f;
    for (int64_t j = 0; results_.stats && j < grid_.width; ++j) {
      float square = squared_norm(head_.at(params_.q, i, j));
      if (!(square <= most)) most = square;  // keeps NaN
    }
    tables_.query_norms[i] = std::sqrt(most);
  }

  float squared_norm(const float* query) const {
    Vec squares{};
    for (int64_t c = 0; c < params_.d; c += kLanes) {
      Vec part = load_part(query + c, static_cast<int>(std::min<int64_t>(kLanes, params_.d - c)));
      squares += part * part;
    }
    return sum(squares);
  }

  void pack_panel(int64_t panel) {
    float* to = tables_.keys + panel * params_.d * kPanel;
    int64_t step = std::min<int64_t>(grid_.stride, kLanes);  // keys of one row that lie side by side
    std::fill(to, to + params_.d * kPanel, 0.0f);
    for (int64_t n = 0; n < kPanel; n += step) {
      int64_t t = (panel * kPanel + n) / grid_.stride, l = (panel * kPanel + n) % grid_.stride;
      if (t >= grid_.height || l >= grid_.width) continue;
      const float* keys = head_.at(params_.k, t, l);
      int64_t count = std::min(step, grid_.width - l);
      if (step == kLanes) {
        pack_columns(keys, params_.k.stride[3], count, params_.d, 1.0f, to + n, kPanel);
      } else {
        for (int64_t r = 0; r < count; ++r)
          for (int64_t c = 0; c < params_.d; ++c) to[c * kPanel + n + r] = keys[r * params_.k.stride[3] + c];
      }
    }
    Vec squares[kBlockVectors] = {};
    for (int64_t c = 0; c < params_.d; ++c)
      for (int n = 0; n < kBlockVectors; ++n) squares[n] += load(to + c * kPanel + n * kLanes) * load(to + c * kPanel + n * kLanes);
    tables_.key_norms[panel] = std::sqrt(largest(max(squares[0], squares[1])));
  }

  // `count` queries from token `first` on.
  void attend(int64_t first, int64_t count) {
    int64_t stride = padded(params_.d);
    float largest = 0.0f;
    for (int64_t r = 0; r < count; ++r) {
      const float* query = head_.at(params_.q, (first + r) / grid_.width, (first + r) % grid_.width);
      Vec squares{};
      for (int64_t c = 0; c < params_.d; c += kLanes) {
        Vec part = load_part(query + c, static_cast<int>(std::min<int64_t>(kLanes, params_.d - c)));
        store(own_.queries + r * stride + c, part);
        squares += part * part;
      }
      float norm = sum(squares);
      if (!(norm <= largest)) largest = norm;  // keeps NaN
    }
    bool safe = is_safe(std::sqrt(largest));
    safe ? score<true>(count) : score<false>(count);
    for (int64_t r = 0; r < count; ++r) {
      switch (grid_.stride / kLanes) {
        case 0: weigh<1, true>(first + r, r, safe); break;
        case 1: weigh<1>(first + r, r, safe); break;
        case 2: weigh<2>(first + r, r, safe); break;
        case 3: weigh<3>(first + r, r, safe); break;
        default: weigh<4>(first + r, r, safe); break;
      }
    }
    float* to[kBlockRows];
    for (int64_t r = 0; r < count; ++r)
      to[r] = results_.out.at(head_.batch, head_.head, (first + r) / grid_.width, (first + r) % grid_.width);
    if (!separate_) return multiply(0, count, {to, nullptr, own_.row_scale, params_.dv});
    float* kept[kBlockRows];
    for (int64_t r = 0; r < count; ++r) kept[r] = results_.first + (token_of_head() + first + r) * params_.dv;
    multiply(0, count, {kept, nullptr, own_.row_scale, params_.dv});
    multiply(1, count, {to, kept, own_.row_scale, params_.dv});
  }

  // Scales rows of `dv` numbers and writes them, or their mean with other rows.
  struct RowStore {
    float* const* rows;
    float* const* others;  // null for none
    const float* row_scale;
    int64_t dv;

    void operator()(int64_t r, int64_t c, Vec x) const {
      int count = static_cast<int>(std::clamp<int64_t>(dv - c, 0, kLanes));
      if (count == 0) return;
      x *= row_scale[r];
      if (others) x = (x + load_part(others[r] + c, count)) * 0.5f;
      if (count == kLanes)
        store(rows[r] + c, x);
      else
        store_part(rows[r] + c, x, count);
    }
  };

  // The product of weights [which] of a block with the values.
  void multiply(int which, int64_t count, const RowStore& store) {
    product(rows_of(own_.weights[which], QueryScratch::weight_stride(grid_)), {tables_.values, padded(params_.dv)}, count,
            padded(params_.dv), params_.tokens(), store);
  }

  int64_t token_of_head() const { return (head_.batch * params_.heads + head_.head) * params_.tokens(); }

  // Saves softmax s of a query: exp(logit) is `total` over all keys and at most `largest`. The backward pass computes
  // exp(logit - maximum) / sum. A weight of exactly 1 must be that there too, so its logit is computed as it is there.
  void save(int s, int64_t token, int64_t r, float total, float largest) {
    float maximum, sum;
    if (total == largest) {
      maximum = largest_logit(s, token, r, largest);
      sum = 1.0f;
    } else {
      maximum = std::log(largest);
      sum = total * exp_bounded(splat(-maximum))[0];
    }
    int64_t all = params_.batch * params_.heads * params_.tokens(), at = token_of_head() + token;
    results_.stats[2 * s * all + at] = maximum;
    results_.stats[(2 * s + 1) * all + at] = sum;
  }

  // The logit of the key whose weight in softmax s is `largest`, to the bits of `score_tile` and `TileMask`.
  float largest_logit(int s, int64_t token, int64_t r, float largest) {
    const int64_t i = token / grid_.width, j = token % grid_.width;
    const bool v2h = params_.v2h && s == 0;
    for (int64_t k = 0; k < grid_.height; ++k) {
      for (int64_t l = 0; l < grid_.width; ++l) {
        int64_t at = k * grid_.stride + l, row = v2h ? i : k, column = v2h ? l : j;
        float weight = own_.scores[r * grid_.count + at];
        if (params_.logit)
          weight *= tables_.rows[j * grid_.count + row * grid_.stride + l] *
                    tables_.columns[i * grid_.count + k * grid_.stride + column];
        if (weight != largest) continue;
        product(rows_of(own_.queries + r * padded(params_.d), padded(params_.d)),
                {tables_.keys + at / kPanel * params_.d * kPanel, kPanel}, 1, kPanel, params_.d,
                ScoreStore{own_.panel, kPanel, params_.scale});
        float score = own_.panel[at % kPanel];
        if (!params_.logit) return score;
        float mask = potentials_.row(row).log_decay(j, l)[0] + potentials_.columns().log_decay(i, k, column)[0];
        return score + mask;
      }
    }
    return std::log(largest);  // not reached
  }

  // Scores of a block of queries, or their exponentials if these are safe.
  template <bool kExponentiate>
  void score(int64_t count) {
    for (int64_t panel = 0; panel < grid_.count / kPanel; ++panel) {
      auto finish = [to = own_.scores + panel * kPanel, stride = grid_.count, scale = params_.scale](
                        int64_t r, int64_t column, Vec x) {
        store(to + r * stride + column, kExponentiate ? exp2_bounded(x * (scale * kLog2E)) : x * scale);
      };
      row_blocks<kBlockVectors>(rows_of(own_.queries, padded(params_.d)), {tables_.keys + panel * params_.d * kPanel, kPanel},
                                count, params_.d, finish, 0);
    }
  }

  // From scores to weights, for query r of a block, which is `token`: up to the factor own_.row_scale[r]. kVectors make up a
  // key row, or kShared: rows share a vector.
  template <int kVectors, bool kShared = false>
  void weigh(int64_t token, int64_t r, bool exponentiated) {
    // Copies: the compiler would read members again after every store.
    const int64_t width = grid_.width, count = grid_.count, i = token / width, j = token % width;
    const int64_t stride = kShared ? grid_.stride : kVectors * kLanes;
    const int64_t rows_of_vector = kShared ? kLanes / stride : 1, steps = grid_.height_in(rows_of_vector);
    const float *rows = tables_.rows + j * count, *columns = tables_.columns + i * count, *inside = tables_.inside;
    float* scores = own_.scores + r * count;
    // Lane m of a shared vector belongs to column m % stride; stride is a power of two.
    IntVec own_lanes = lane_index() & static_cast<int>(stride - 1);
    IntVec query_lanes = (lane_index() & ~static_cast<int>(stride - 1)) + static_cast<int>(j);
    Vec of_row[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      of_row[v] = load(rows + i * stride + v * kLanes);
      if (kShared) of_row[v] = shuffle(of_row[v], own_lanes);
    }
    // Calls body(step, vector of the row, where it lies, mask of V2H * first, mask of H2V * second).
    auto each = [&](float first, float second, auto body) {
      Vec scaled[kVectors];
      for (int v = 0; v < kVectors; ++v) scaled[v] = of_row[v] * first;
      for (int64_t step = 0; step < steps; ++step) {
        int64_t at = step * kVectors * kLanes;
        Vec to_row = kShared ? shuffle(load(columns + at), query_lanes) : splat(columns[at + j]);
        to_row *= second;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          int64_t here = at + v * kLanes;
          body(step, v, here, scaled[v] * load(columns + here), to_row * load(rows + here));
        }
      }
    };
    auto write = [=](float* weights, int64_t step, int v, Vec weight) {
      // The next row overwrites the padding.
      float* to = weights + step * rows_of_vector * width + v * kLanes;
      store(to, weight);
      for (int64_t more = 1; kShared && more < rows_of_vector; ++more)
        store(to + more * width, shuffle(weight, (lane_index() + static_cast<int>(more * stride)) & (kLanes - 1)));
    };
    if (!exponentiated) {
      const Vec none = splat(-__builtin_inff());
      Vec top = none;
      for (int64_t at = 0; at < count; at += kLanes)
        top = max(top, select(load(inside + at) > 0.0f, load(scores + at), none));
      float largest_score = largest(top);
      // The padding has a score of 0, which may lie above all others: an exponential of that could be infinite.
      for (int64_t at = 0; at < count; at += kLanes)
        store(scores + at, exp_weight(min(load(scores + at) - largest_score, Vec{})));
    }
    float* weights[2];
    for (int path : {0, 1}) weights[path] = own_.weights[path] + r * QueryScratch::weight_stride(grid_);
    own_.row_scale[r] = 1.0f;
    if (!params_.logit) {
      // One softmax, without the mask: its sum comes with the weights, and divides what they sum up to. Weights of up to
      // exp(kSafeScore) leave 22 orders of magnitude for the values.
      Vec total[kVectors] = {};
      each(params_.v2h, params_.h2v, [&](int64_t step, int v, int64_t here, Vec v2h, Vec h2v) {
        Vec e = load(scores + here);
        total[v] += e * load(inside + here);
        write(weights[0], step, v, e * (v2h + h2v));
      });
      for (int v = 1; v < kVectors; ++v) total[0] += total[v];
      own_.row_scale[r] = 1.0f / sum(total[0]);
      if (results_.stats) {
        Vec most{};
        for (int64_t at = 0; at < count; at += kLanes) most = max(most, load(scores + at) * load(inside + at));
        save(0, token, r, sum(total[0]), largest(most));
      }
      return;
    }
    Vec first[kVectors] = {}, second[kVectors] = {}, most[2] = {};
    auto sum_paths = [&](auto saving) {
      each(1.0f, 1.0f, [&](int64_t, int v, int64_t here, Vec v2h, Vec h2v) {
        Vec e = load(scores + here);
        first[v] += e * v2h;
        second[v] += e * h2v;
        if (saving.value) most[0] = max(most[0], e * v2h), most[1] = max(most[1], e * h2v);
      });
    };
    results_.stats ? sum_paths(std::true_type{}) : sum_paths(std::false_type{});
    for (int v = 1; v < kVectors; ++v) first[0] += first[v], second[0] += second[v];
    float sums[2] = {sum(first[0]), sum(second[0])}, least = exponentiated ? 0.0f : kLeastSum;
    if ((params_.v2h && sums[0] < least) || (params_.h2v && sums[1] < least)) return weigh_by_logarithms(token, r);
    const float counted = separate_ ? 1.0f : params_.path_weight();
    float of_v2h = params_.v2h ? counted / sums[0] : 0.0f, of_h2v = params_.h2v ? counted / sums[1] : 0.0f;
    if (results_.stats) {
      if (params_.v2h) save(0, token, r, sums[0], largest(most[0]));
      if (params_.h2v) save(has_two_softmaxes(params_), token, r, sums[1], largest(most[1]));
    }
    if (separate_) {
      each(of_v2h, of_h2v, [&](int64_t step, int v, int64_t here, Vec v2h, Vec h2v) {
        Vec e = load(scores + here);
        write(weights[0], step, v, e * v2h);
        write(weights[1], step, v, e * h2v);
      });
    } else {
      each(of_v2h, of_h2v, [&](int64_t step, int v, int64_t here, Vec v2h, Vec h2v) {
        write(weights[0], step, v, load(scores + here) * (v2h + h2v));
      });
    }
  }

  // The same with a softmax of scores plus log mask for each path: slow and rare.
  void weigh_by_logarithms(int64_t token, int64_t r) {
    int64_t i = token / grid_.width, j = token % grid_.width, tokens = params_.tokens();
    float* weights = own_.weights[0] + r * QueryScratch::weight_stride(grid_);
    float* logits = own_.scores + r * grid_.count;
    std::fill(weights, weights + tokens, 0.0f);
    for (bool v2h : {true, false}) {
      if (!(v2h ? params_.v2h : params_.h2v)) continue;
      float top = -__builtin_inff(), total = 0.0f;
      for (int64_t key = 0; key < tokens; ++key) {
        int64_t k = key / grid_.width, l = key % grid_.width;
        float along_row = potentials_.row(v2h ? i : k).log_decay(j, l)[0];
        float along_column = potentials_.columns().log_decay(i, k, v2h ? l : j)[0];
        float dot = 0.0f;
        const float* other = head_.at(params_.k, k, l);
        for (int64_t c = 0; c < params_.d; ++c) dot += own_.queries[r * padded(params_.d) + c] * other[c];
        logits[key] = dot * params_.scale + (along_row + along_column);
        top = std::max(top, logits[key]);
      }
      for (int64_t key = 0; key < tokens; ++key) {
        logits[key] = exp_weight(splat(logits[key] - top))[0];
        total += logits[key];
      }
      for (int64_t key = 0; key < tokens; ++key) weights[key] += logits[key] * (params_.path_weight() / total);
    }
  }

  const AttentionParams& params_;
  const AttentionResults& results_;
  const Keys& grid_;
  const bool separate_;  // each path has a product with the values of its own
  Head head_;
  HeadTables tables_;
  GridPotentials potentials_;
  QueryScratch own_;
  float key_norm_ = 0.0f;
};

}  // namespace

namespace ppma {

bool is_small(const AttentionParams& params) {
  return !params.key_bias && params.tokens() <= kMostTokens && params.width <= kMostVectors * kLanes;
}

int small_attention(const AttentionParams& params, const AttentionResults& results, const AnyScores& any_scores) {
  Keys grid(params);
  return for_tasks(params.batch * params.heads, (params.tokens() + kBlockRows - 1) / kBlockRows, params.threads,
                   std::max(floats_of<HeadTables>(params, grid), any_scores.shared_floats),
                   std::max(floats_of<QueryScratch>(params, grid), any_scores.own_floats),
                   [&](int64_t task, Team team, float* shared, float* own) {
                     Small small(params, results, grid, task, Arena(shared), Arena(own));
                     if (small.prepare(team) || !results.stats)
                       small.run(team);
                     else
                       any_scores.run(params, results, task, team, shared, own);
                   });
}

}  // namespace ppma
