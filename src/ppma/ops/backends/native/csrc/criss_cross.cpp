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

// The memory that one thread needs for a line.
struct ThreadScratch {
  float *map, *row_scale;   // n x n, n
  float *values, *of_rows;  // n x dv
  LineScratch line;

  ThreadScratch(Arena& arena, const AttentionParams& params, int64_t n)
      : map(arena.take(n * padded(n))),
        row_scale(arena.take(padded(n))),
        values(arena.take(n * padded(params.dv))),
        of_rows(arena.take(n * padded(params.dv))),
        line(arena, n, params.d) {}
};

// The memory of one head, shared by the threads that work on it.
struct HeadScratch {
  float *after_columns, *after_rows;  // tokens x dv; what H2V makes of after_rows replaces it
  bool keeps_maps;
  float *row_maps, *row_scales;

  HeadScratch(Arena& arena, const AttentionParams& params)
      : after_columns(arena.take(params.tokens() * padded(params.dv))),
        after_rows(arena.take(params.tokens() * padded(params.dv))),
        keeps_maps(params.v2h && params.h2v && params.tokens() * padded(params.width) <= kKeptFloats),
        row_maps(arena.take(keeps_maps ? params.tokens() * padded(params.width) : 0)),
        row_scales(arena.take(keeps_maps ? params.height * padded(params.width) : 0)) {}
};

template <bool kLogit>
void forward(const AttentionParams& params, const View& out, int64_t task, Team team, float* head_memory, float* own_memory) {
  Arena head_arena(head_memory), own_arena(own_memory);
  HeadScratch head(head_arena, params);
  ThreadScratch own(own_arena, params, params.longest_line());
  int64_t channels = padded(params.dv);
  auto line_at = [&](bool row, int64_t index) {
    return Line{params, task / params.heads, task % params.heads, row, index};
  };

  // Multiplies the map of a line with tokens in padded rows, and adds `plus` if it is given.
  auto apply = [&](const Line& line, const float* map, const float* row_scale, const float* from, float weight, Tokens plus,
                   Tokens to, int64_t columns) {
    int64_t n = line.size();
    product(rows_of(map, padded(n)), {from, channels}, n, channels, n,
            MixedStore{to.data, to.stride, columns, plus.data, plus.stride, row_scale, weight});
  };
  auto packed = [&](const Line& line, Tokens tokens, int64_t columns, float* to) {
    pack_rows(tokens.data, tokens.stride, line.size(), columns, to);
    return to;
  };
  auto row_map = [&](int64_t i) { return head.keeps_maps ? head.row_maps + i * params.width * padded(params.width) : own.map; };
  auto row_scale = [&](int64_t i) { return head.keeps_maps ? head.row_scales + i * padded(params.width) : own.row_scale; };
  const Tokens nothing{nullptr, 0};

  if (params.h2v) {
    team.share(params.height, [&](int64_t i) {
      Line row = line_at(true, i);
      line_map<kLogit>(row, own.line, row_map(i), row_scale(i));
      apply(row, row_map(i), row_scale(i), packed(row, row.of(params.v), params.dv, own.values), 1.0f, nothing,
            row.of(head.after_rows, channels), channels);
    });
    team.barrier();
  }
  team.share(params.width, [&](int64_t j) {
    Line column = line_at(false, j);
    line_map<kLogit>(column, own.line, own.map, own.row_scale);
    Tokens inner = column.of(head.after_rows, channels);
    if (params.v2h)
      apply(column, own.map, own.row_scale, packed(column, column.of(params.v), params.dv, own.values), 1.0f, nothing,
            column.of(head.after_columns, channels), channels);
    if (params.h2v)
      apply(column, own.map, own.row_scale, packed(column, inner, channels, own.of_rows), params.path_weight(), nothing,
            params.v2h ? inner : column.of(out), params.v2h ? channels : params.dv);
  });
  if (params.v2h) {
    team.barrier();
    team.share(params.height, [&](int64_t i) {
      Line row = line_at(true, i);
      if (!head.keeps_maps) line_map<kLogit>(row, own.line, own.map, own.row_scale);
      apply(row, row_map(i), row_scale(i), row.of(head.after_columns, channels).data, params.path_weight(),
            params.h2v ? row.of(head.after_rows, channels) : nothing, row.of(out), params.dv);
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
