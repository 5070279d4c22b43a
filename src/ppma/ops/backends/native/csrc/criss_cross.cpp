// Criss-cross attention: masked attention within columns and within rows, chained. V2H is rows (columns v), H2V is
// columns (rows v); the maps of both are the same.
#include "line_map.h"
#include "parallel.h"
#include "params.h"

using namespace ppma;

namespace {

// Row maps are used at both ends of the chain. Those of a head are kept in between if they fit the cache of a core, at most
// this many floats, and recomputed otherwise.
constexpr int64_t kKeptFloats = 1 << 20;

// Channels of a token in scratch memory: those that V2H makes, then those that H2V makes.
struct Channels {
  int64_t padded_dv, of_h2v, all;

  explicit Channels(const AttentionParams& params)
      : padded_dv(padded(params.dv)), of_h2v(params.v2h ? padded_dv : 0), all(of_h2v + (params.h2v ? padded_dv : 0)) {}
};

// The memory that one thread needs for a line.
struct ThreadScratch {
  float *map, *row_scale;  // n x n, n
  float* values;           // n x channels
  LineScratch line;

  ThreadScratch(Arena& arena, const AttentionParams& params, int64_t n)
      : map(arena.take(n * padded(n))),
        row_scale(arena.take(padded(n))),
        values(arena.take(n * Channels(params).all)),
        line(arena, n, params.d) {}
};

// The memory of one head, shared by the threads that work on it.
struct HeadScratch {
  float* halfway;  // tokens x channels
  bool keeps_maps;
  float *row_maps, *row_scales;

  HeadScratch(Arena& arena, const AttentionParams& params)
      : halfway(arena.take(params.tokens() * Channels(params).all)),
        keeps_maps(params.v2h && params.h2v && params.tokens() * padded(params.width) <= kKeptFloats),
        row_maps(arena.take(keeps_maps ? params.tokens() * padded(params.width) : 0)),
        row_scales(arena.take(keeps_maps ? params.height * padded(params.width) : 0)) {}
};

// Rows of v for H2V; columns of v and of these, in one product; rows of the former for V2H, with the latter added.
template <bool kLogit>
void forward(const AttentionParams& params, const View& out, int64_t task, Team team, float* head_memory, float* own_memory) {
  Arena head_arena(head_memory), own_arena(own_memory);
  HeadScratch head(head_arena, params);
  ThreadScratch own(own_arena, params, params.longest_line());
  const Channels channels(params);
  auto line_at = [&](bool row, int64_t index) {
    return Line{params, task / params.heads, task % params.heads, row, index};
  };
  auto halfway = [&](const Line& line, int64_t first) { return line.of(head.halfway + first, channels.all); };

  // Multiplies the map of a line with `count` channels of its tokens, and adds `plus` if it is given.
  auto apply = [&](const Line& line, const float* map, const float* row_scale, Right from, int64_t count, float weight,
                   Tokens plus, Tokens to, int64_t columns) {
    int64_t n = line.size();
    product(rows_of(map, padded(n)), from, n, count, n,
            MixedStore{to.data, to.stride, columns, plus.data, plus.stride, row_scale, weight});
  };
  auto pack = [&](const Line& line, Tokens tokens, int64_t columns, int64_t first) {
    pack_rows(tokens.data, tokens.stride, line.size(), columns, own.values + first, channels.all);
  };
  auto row_map = [&](int64_t i) { return head.keeps_maps ? head.row_maps + i * params.width * padded(params.width) : own.map; };
  auto row_scale = [&](int64_t i) { return head.keeps_maps ? head.row_scales + i * padded(params.width) : own.row_scale; };
  const Tokens nothing{nullptr, 0};
  auto map_of = [&](const Line& line, float* map, float* scale) {
    Line next = line_at(line.row, line.index + 1);
    prefetch(next, params.q, params.d);
    prefetch(next, params.k, params.d);
    line_map<kLogit>(line, own.line, map, scale);
    prefetch(next, params.v, params.dv);
  };

  if (params.h2v) {
    team.share(params.height, [&](int64_t i) {
      Line row = line_at(true, i);
      map_of(row, row_map(i), row_scale(i));
      Tokens v = row.of(params.v);
      Right values{v.data, v.stride};
      if (params.dv != channels.padded_dv) {  // whole vectors would reach beyond the channels
        pack(row, v, params.dv, 0);
        values = {own.values, channels.all};
      }
      apply(row, row_map(i), row_scale(i), values, channels.padded_dv, params.path_weight(), nothing,
            halfway(row, channels.of_h2v), channels.padded_dv);
    });
    team.barrier();
  }
  team.share(params.width, [&](int64_t j) {
    Line column = line_at(false, j);
    map_of(column, own.map, own.row_scale);
    if (params.v2h) pack(column, column.of(params.v), params.dv, 0);
    if (params.h2v) pack(column, halfway(column, channels.of_h2v), channels.padded_dv, channels.of_h2v);
    apply(column, own.map, own.row_scale, {own.values, channels.all}, channels.all, 1.0f, nothing,
          params.v2h ? halfway(column, 0) : column.of(out), params.v2h ? channels.all : params.dv);
  });
  if (params.v2h) {
    team.barrier();
    // Backwards: the maps that were kept last are in the nearest cache.
    team.share(params.height, [&](int64_t done) {
      const int64_t i = params.height - 1 - done;
      Line row = line_at(true, i);
      if (!head.keeps_maps) line_map<kLogit>(row, own.line, own.map, own.row_scale);
      apply(row, row_map(i), row_scale(i), {halfway(row, 0).data, channels.all}, channels.padded_dv, params.path_weight(),
            params.h2v ? halfway(row, channels.of_h2v) : nothing, row.of(out), params.dv);
    });
  }
}

}  // namespace

PPMA_EXPORT int ppma_criss_cross_attention(const AttentionParams* params, const View* out) {
  auto body = params->logit ? forward<true> : forward<false>;
  return for_tasks(params->batch * params->heads, params->longest_line(), params->threads, floats_of<HeadScratch>(*params),
                   floats_of<ThreadScratch>(*params, params->longest_line()),
                   [&](int64_t task, Team team, float* head, float* own) { body(*params, *out, task, team, head, own); });
}
