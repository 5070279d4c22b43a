// What the forward and the backward pass of full attention must compute to the same bits: see `score_tile`.
#include "attention_tiles.h"

namespace ppma {

void GridPotentials::fill(Team team) {
  const Problem& problem = head_.problem;
  Base base = problem.logit ? Base::kE : Base::kTwo;
  team.share(problem.height + 1, [&](int64_t i) {
    if (i < problem.height) {
      Potentials::fill(of_row(i), head_.at(problem.log_alpha, i, 0), problem.log_alpha.stride[3], problem.width, base);
    } else {
      ColumnPotentials::fill(of_row(i), head_.at(problem.log_beta, 0, 0), problem.log_beta.stride[2],
                             problem.log_beta.stride[3], problem.height, problem.width, base);
    }
  });
  team.barrier();
}

void score_tile(const Head& head, const float* queries, int64_t count, const Run& keys, float* keys_transposed,
                float* scores) {
  const Problem& problem = head.problem;
  int64_t stride = score_stride(keys.tokens());
  head.pack_transposed(problem.k, problem.d, keys, 1.0f, keys_transposed, stride);
  // The scale comes after the product, and log2(e) nowhere: scores that float32 can hold keep their exact distances.
  product(rows_of(queries, padded(problem.d)), {keys_transposed, stride}, count, padded(keys.tokens()), problem.d,
          ScoreStore{scores, stride, problem.scale});
}

}  // namespace ppma
