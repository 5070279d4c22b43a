// The steps of a block, one kernel after the other, on a few images at a time: what lies between two steps stays in the
// cache of the processor and needs little memory, and no step goes through Python.
#include "block.h"

#include <algorithm>
#include <cmath>

#include "decay_activation.h"
#include "packed_linear.h"
#include "parallel.h"
#include "params.h"

using namespace ppma;

PPMA_EXPORT int ppma_depthwise_conv(const View* x, const float* weight, const float* bias, const View* base, const View* out,
                                    const int64_t* sizes, int64_t kernel, int with_gelu, int threads);
PPMA_EXPORT int ppma_packed_linear(const PackedLinearParams* given);
PPMA_EXPORT int ppma_polyline_attention(const AttentionParams* params, const View* out, float* stats, float* first);
PPMA_EXPORT int ppma_criss_cross_attention(const AttentionParams* params, const View* out);

namespace {

constexpr int64_t kGroupTokens = 4096;  // of the images that go through the block together
constexpr int64_t kDecayTokens = 1024;  // of a task

// What lies between the steps, for `images` images.
struct Workspace {
  float* placed;  // tokens x dim; later with the attention added
  float* packed;  // tokens x (q, k, v, decays)
  float* attended;
  float *hidden, *mixed;  // tokens x hidden, in the place of the two above

  Workspace(Arena& arena, const BlockParams& params, int64_t images)
      : placed(arena.take(images * params.height * params.width * params.dim)) {
    int64_t tokens = images * params.height * params.width, columns = packed_columns(params);
    float* rest = arena.take(tokens * std::max(columns + params.dim, 2 * params.hidden) + 32);
    packed = rest, attended = rest ? rest + (tokens * columns + 15) / 16 * 16 : nullptr;
    hidden = rest, mixed = rest ? rest + (tokens * params.hidden + 15) / 16 * 16 : nullptr;
  }
  static int64_t packed_columns(const BlockParams& params) { return 3 * params.dim + params.heads * params.decays; }
};

class Block {
 public:
  Block(const BlockParams& params, int64_t first, int64_t images, float* memory)
      : params_(params),
        images_(images),
        grid_(params.height * params.width),
        tokens_(images * grid_),
        columns_(Workspace::packed_columns(params)),
        x_(const_cast<float*>(params.x) + first * grid_ * params.dim),
        out_(params.out + first * grid_ * params.dim),
        space_(make(params, images, memory)) {}

  // Returns 1 if there is no memory.
  int run() const {
    int64_t dim = params_.dim;
    if (depthwise(x_, dim, dim, params_.position, params_.position_bias, nullptr, space_.placed, 3, false)) return 1;
    PackedLinearParams qkv = linear(space_.placed, dim, params_.qkv, params_.qkv_bias, nullptr, space_.packed, columns_);
    qkv.norm_eps = params_.attn_eps;
    qkv.cosine = params_.cosine, qkv.sine = params_.sine;
    qkv.rotated = 2 * dim, qkv.head_dim = dim / params_.heads, qkv.tokens = grid_;
    if (ppma_packed_linear(&qkv)) return 1;
    if (params_.decays) activate_decays();
    if (attend()) return 1;
    // The values' convolution adds to the attention's result, in place.
    if (depthwise(space_.packed + 2 * dim, columns_, dim, params_.local, params_.local_bias, space_.attended,
                  space_.attended, 5, false))
      return 1;
    PackedLinearParams proj =
        linear(space_.attended, dim, params_.proj, params_.proj_bias, space_.placed, space_.placed, dim);
    if (ppma_packed_linear(&proj)) return 1;
    PackedLinearParams expand =
        linear(space_.placed, dim, params_.expand, params_.expand_bias, nullptr, space_.hidden, params_.hidden);
    expand.norm_eps = params_.ffn_eps;
    if (ppma_packed_linear(&expand)) return 1;
    if (depthwise(space_.hidden, params_.hidden, params_.hidden, params_.mix, params_.mix_bias, nullptr, space_.mixed, 3,
                  true))
      return 1;
    PackedLinearParams reduce =
        linear(space_.mixed, params_.hidden, params_.reduce, params_.reduce_bias, space_.placed, out_, dim);
    return ppma_packed_linear(&reduce);
  }

 private:
  static Workspace make(const BlockParams& params, int64_t images, float* memory) {
    Arena arena(memory);
    return Workspace(arena, params, images);
  }

  // Channels of a grid whose pixels lie `pixel` floats apart.
  View channels(float* data, int64_t pixel) const {
    return {data, {grid_ * pixel, params_.width * pixel, pixel, 1, 0}};
  }

  // Of a head's channels in tokens that lie `token` floats apart.
  View heads(float* data, int64_t token, int64_t head) const {
    return {data, {grid_ * token, head, params_.width * token, token, 1}};
  }

  int depthwise(float* x, int64_t pixel, int64_t count, const float* weight, const float* bias, float* base, float* out,
                int64_t kernel, bool gelu) const {
    View from = channels(x, pixel), plus = channels(base, count), to = channels(out, count);
    int64_t sizes[4] = {images_, params_.height, params_.width, count};
    return ppma_depthwise_conv(&from, weight, bias, base ? &plus : nullptr, &to, sizes, kernel, gelu, params_.threads);
  }

  PackedLinearParams linear(const float* x, int64_t inputs, const float* packed, const float* bias, const float* residual,
                            float* out, int64_t outputs) const {
    PackedLinearParams linear{};
    linear.x = x, linear.x_stride = inputs, linear.inputs = inputs;
    linear.packed = packed, linear.bias = bias;
    linear.residual = residual, linear.residual_stride = outputs;
    linear.out = out, linear.out_stride = outputs, linear.outputs = outputs;
    linear.rows = tokens_, linear.norm_eps = -1.0f, linear.tokens = 1, linear.threads = params_.threads;
    return linear;
  }

  // Logits of the decays to log-decays, -rate * activation(logit + bias), in place.
  void activate_decays() const {
    int64_t count = params_.heads * params_.decays;
    parallel_for((tokens_ + kDecayTokens - 1) / kDecayTokens, params_.threads, [&](int64_t task) {
      for (int64_t t = task * kDecayTokens; t < std::min(tokens_, (task + 1) * kDecayTokens); ++t) {
        float* at = space_.packed + t * columns_ + 3 * params_.dim;
        for (int64_t c = 0; c < count; c += kLanes) {
          int lanes = static_cast<int>(std::min<int64_t>(kLanes, count - c));
          Vec x = load_part(at + c, lanes) + load_part(params_.decay_bias + c, lanes);
          Vec rate = params_.decay_rate ? load_part(params_.decay_rate + c, lanes) : splat(1.0f);
          store_part(at + c, -rate * decay_activation(x, params_.softplus).value, lanes);
        }
      }
    });
  }

  int attend() const {
    int64_t dim = params_.dim, head_dim = dim / params_.heads;
    AttentionParams attention{};
    attention.q = heads(space_.packed, columns_, head_dim);
    attention.k = heads(space_.packed + dim, columns_, head_dim);
    attention.v = heads(space_.packed + 2 * dim, columns_, head_dim);
    if (params_.decays) {
      float* decays = space_.packed + 3 * dim;
      attention.log_alpha = heads(decays, columns_, params_.decays);
      attention.log_beta = heads(decays + params_.decays - 1, columns_, params_.decays);
    } else {
      attention.log_alpha = attention.log_beta = {const_cast<float*>(params_.log_decay), {0, 1, 0, 0, 0}};
    }
    attention.batch = images_, attention.heads = params_.heads;
    attention.height = params_.height, attention.width = params_.width;
    attention.d = attention.dv = head_dim;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    attention.logit = params_.logit, attention.v2h = params_.v2h, attention.h2v = params_.h2v;
    attention.threads = params_.threads;
    View out = heads(space_.attended, dim, head_dim);
    return params_.full ? ppma_polyline_attention(&attention, &out, nullptr, nullptr)
                        : ppma_criss_cross_attention(&attention, &out);
  }

  const BlockParams& params_;
  const int64_t images_, grid_, tokens_, columns_;
  float *const x_, *const out_;
  const Workspace space_;
};

}  // namespace

PPMA_EXPORT int ppma_block(const BlockParams* params) {
  int64_t grid = params->height * params->width;
  int64_t group = std::min(params->batch, std::max<int64_t>(1, kGroupTokens / grid));
  if (group == 0) return 0;
  float* memory = Scratch::floats<2>(floats_of<Workspace>(*params, group));
  if (!memory) return 1;
  int failed = 0;
  for (int64_t first = 0; first < params->batch && !failed; first += group)
    failed = Block(*params, first, std::min(group, params->batch - first), memory).run();
  Scratch::trim<2>();
  return failed;
}
