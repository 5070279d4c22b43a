// Runs the softmax attentions of csrc on raw files, where there is no Python: tests/ops/test_native_arm.py.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "params.h"

using namespace ppma;

extern "C" {
int ppma_criss_cross_attention(const AttentionParams*, const View*);
int ppma_criss_cross_attention_backward(const AttentionParams*, const Gradients*);
int ppma_polyline_attention(const AttentionParams*, const View*, float* stats, float* first);
int ppma_polyline_attention_backward(const AttentionParams*, const Gradients*, const View*, const float*, const float*);
}

// Arguments: function, logit, batch, heads, height, width, d, dv. Standard input: q, k, v, log_alpha, log_beta and the
// gradient of the output. Standard output: the output without and with what a backward pass needs, and the gradients.
int main(int, char** arguments) {
  bool criss_cross = !std::strcmp(arguments[1], "criss_cross_attention");
  int64_t sizes[7];
  for (int i = 0; i < 7; ++i) sizes[i] = std::atoi(arguments[2 + i]);
  auto [logit, batch, heads, height, width, d, dv] = sizes;
  int64_t tokens = batch * heads * height * width;
  std::vector<std::vector<float>> memory;
  memory.reserve(16);
  auto take = [&](int64_t channels, bool read) {
    memory.emplace_back(tokens * channels);
    std::vector<float>& floats = memory.back();
    if (read && std::fread(floats.data(), sizeof(float), floats.size(), stdin) != floats.size()) std::exit(1);
    return View{floats.data(), {heads * height * width * channels, height * width * channels, width * channels, channels, 1}};
  };
  View q = take(d, true), k = take(d, true), v = take(dv, true), log_alpha = take(1, true), log_beta = take(1, true);
  Gradients gradients{take(dv, true), take(d, false), take(d, false), take(dv, false), take(1, false), take(1, false)};
  View plain = take(dv, false), out = take(dv, false);
  std::vector<float> stats(4 * tokens), first(tokens * dv);
  AttentionParams params{q, k, v, log_alpha, log_beta, batch, heads, height, width, d, dv, 1.0f / 4,
                         static_cast<int32_t>(logit), 1, 1, 1, nullptr};
  int failed;
  if (criss_cross) {
    failed = ppma_criss_cross_attention(&params, &plain) || ppma_criss_cross_attention(&params, &out) ||
             ppma_criss_cross_attention_backward(&params, &gradients);
  } else {
    failed = ppma_polyline_attention(&params, &plain, nullptr, nullptr) ||
             ppma_polyline_attention(&params, &out, stats.data(), first.data()) ||
             ppma_polyline_attention_backward(&params, &gradients, &out, stats.data(), first.data());
  }
  for (size_t part : {11, 12, 6, 7, 8, 9, 10})
    std::fwrite(memory[part].data(), sizeof(float), memory[part].size(), stdout);
  return failed;
}
