// What the forward and the backward pass of full attention must compute to the same bits: see `score_tile`.
#include "attention_tiles.h"

namespace ppma {
namespace {

void add_bias(float* row, const float* bias, int64_t count) {
  for (int64_t c = 0; c < count; c += kLanes) {
    int here = count - c < kLanes ? static_cast<int>(count - c) : kLanes;
    store(row + c, load(row + c) + load_part(bias + c, here));
  }
}

}  // namespace

void GridPotentials::fill(Team team) {
  const AttentionParams& params = head_.params;
  Base base = params.logit ? Base::kE : Base::kTwo;
  team.share(params.height + 1, [&](int64_t i) {
    if (i < params.height) {
      Potentials::fill(of_row(i), head_.at(params.log_alpha, i, 0), params.log_alpha.stride[3], params.width, base);
    } else {
      ColumnPotentials::fill(of_row(i), head_.at(params.log_beta, 0, 0), params.log_beta.stride[2],
                             params.log_beta.stride[3], params.height, params.width, base);
    }
  });
  team.barrier();
}

void score_tile(const Head& head, const float* queries, int64_t count, const Run& keys, float* keys_transposed,
                float* scores) {
  const AttentionParams& params = head.params;
  int64_t stride = score_stride(keys.tokens());
  head.pack_transposed(params.k, params.d, keys, 1.0f, keys_transposed, stride);
  // The scale comes after the product, and log2(e) nowhere: scores that float32 can hold keep their exact distances.
  product(rows_of(queries, padded(params.d)), {keys_transposed, stride}, count, padded(keys.tokens()), params.d,
          ScoreStore{scores, stride, params.scale});
  if (!params.key_bias) return;
  const float* bias = params.key_bias + head.batch * params.tokens() + keys.row * params.width + keys.column;
  for (int64_t query = 0; query < count; ++query) add_bias(scores + query * stride, bias, keys.tokens());
}

}  // namespace ppma
