// The steps of some blocks, one kernel after the other, on a few images at a time: what lies between two steps stays in the
// cache of the processor and needs little memory, and no step goes through Python.
#include "block.h"

#include <algorithm>
#include <cmath>

#include "depthwise.h"
#include "packed_linear.h"
#include "parallel.h"
#include "params.h"
#include "simd.h"

using namespace ppma;

PPMA_EXPORT int ppma_polyline_attention(const AttentionParams* params, const View* out, float* stats, float* first);
PPMA_EXPORT int ppma_criss_cross_attention(const AttentionParams* params, const View* out);

namespace {

// Of the images that go through the blocks together, with all threads and with one.
constexpr int64_t kGroupTokens = 4096, kTokensOfThread = 256;
constexpr int64_t kMostTokensOfThread = 1 << 14;  // in larger images threads share the memory between the steps

// From token to token, an odd number of cache lines: tokens of a column would otherwise meet in a few sets of a cache.
int64_t spread(int64_t channels) { return ((channels + kCacheLine - 1) / kCacheLine | 1) * kCacheLine; }

// What lies between the steps, for `images` images.
struct Workspace {
  float* placed;      // tokens x dim; later with the attention added
  float* log_decays;  // images x heads x decays x grid
  float* qkv;         // tokens x (q, k, v), spread
  float* attended;
  float *hidden, *mixed;  // tokens x hidden, in the place of the two above

  Workspace(Arena& arena, const BlockParams& params, int64_t images)
      : placed(arena.take(images * params.height * params.width * params.dim)),
        log_decays(arena.take(images * params.height * params.width * params.heads * params.decays)) {
    int64_t tokens = images * params.height * params.width, dim = params.dim;
    float* rest = arena.take(tokens * std::max(spread(3 * dim) + dim, 2 * params.hidden) + 32);
    qkv = rest, attended = rest ? rest + tokens * spread(3 * dim) : nullptr;
    hidden = rest, mixed = rest ? rest + (tokens * params.hidden + 15) / 16 * 16 : nullptr;
  }
};

class Block {
 public:
  Block(const BlockParams& params, int64_t first, int64_t images, int threads, float* memory)
      : params_(params),
        threads_(threads),
        images_(images),
        grid_(params.height * params.width),
        tokens_(images * grid_),
        x_(const_cast<float*>(params.x) + first * grid_ * params.dim),
        out_(params.out + first * grid_ * params.dim),
        space_(make(params, images, memory)) {}

  // Returns 1 if there is no memory.
  int run() const {
    int64_t dim = params_.dim;
    if (depthwise(x_, dim, dim, params_.position, nullptr, space_.placed, 3, false)) return 1;
    PackedLinearParams qkv = linear(space_.placed, dim, params_.qkv, params_.qkv_bias, nullptr, space_.qkv, 3 * dim);
    qkv.out_stride = spread(3 * dim);
    qkv.norm_eps = params_.attn_eps;
    qkv.cosine = params_.cosine, qkv.sine = params_.sine;
    qkv.rotated = 2 * dim, qkv.head_dim = dim / params_.heads, qkv.tokens = grid_;
    DecayColumns decays{params_.decay, params_.decays * dim, dim, params_.decay_bias, params_.decay_rate,
                        space_.log_decays, nullptr, params_.heads, params_.decays, params_.softplus};
    if (packed_linear(qkv, params_.decays ? &decays : nullptr)) return 1;
    if (attend()) return 1;
    // The values' convolution adds to the attention's result, in place.
    if (depthwise(space_.qkv + 2 * dim, spread(3 * dim), dim, params_.local, space_.attended, space_.attended, 5, false))
      return 1;
    PackedLinearParams proj =
        linear(space_.attended, dim, params_.proj, params_.proj_bias, space_.placed, space_.placed, dim);
    if (packed_linear(proj, nullptr)) return 1;
    PackedLinearParams expand =
        linear(space_.placed, dim, params_.expand, params_.expand_bias, nullptr, space_.hidden, params_.hidden);
    expand.norm_eps = params_.ffn_eps;
    if (packed_linear(expand, nullptr)) return 1;
    if (depthwise(space_.hidden, params_.hidden, params_.hidden, params_.mix, nullptr, space_.mixed, 3, true)) return 1;
    PackedLinearParams reduce =
        linear(space_.mixed, params_.hidden, params_.reduce, params_.reduce_bias, space_.placed, out_, dim);
    return packed_linear(reduce, nullptr);
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

  int depthwise(float* x, int64_t pixel, int64_t count, const float* taps, float* base, float* out, int64_t kernel,
                bool gelu) const {
    View from = channels(x, pixel), plus = channels(base, count), to = channels(out, count);
    int64_t sizes[4] = {images_, params_.height, params_.width, count};
    return packed_depthwise(from, taps, base ? &plus : nullptr, to, sizes, kernel, gelu, threads_);
  }

  PackedLinearParams linear(const float* x, int64_t inputs, const float* packed, const float* bias, const float* residual,
                            float* out, int64_t outputs) const {
    PackedLinearParams linear{};
    linear.x = x, linear.x_stride = inputs, linear.inputs = inputs;
    linear.packed = packed, linear.bias = bias;
    linear.residual = residual, linear.residual_stride = outputs;
    linear.out = out, linear.out_stride = outputs, linear.outputs = outputs;
    linear.rows = tokens_, linear.norm_eps = -1.0f, linear.tokens = 1, linear.threads = threads_;
    return linear;
  }

  int attend() const {
    int64_t dim = params_.dim, head_dim = dim / params_.heads;
    AttentionParams attention{};
    attention.q = heads(space_.qkv, spread(3 * dim), head_dim);
    attention.k = heads(space_.qkv + dim, spread(3 * dim), head_dim);
    attention.v = heads(space_.qkv + 2 * dim, spread(3 * dim), head_dim);
    if (params_.decays) {
      int64_t of_head = params_.decays * grid_;
      View of_heads{space_.log_decays, {params_.heads * of_head, of_head, params_.width, 1, 0}};
      attention.log_alpha = attention.log_beta = of_heads;
      attention.log_beta.data += (params_.decays - 1) * grid_;
    } else {
      attention.log_alpha = attention.log_beta = {const_cast<float*>(params_.log_decay), {0, 1, 0, 0, 0}};
    }
    attention.batch = images_, attention.heads = params_.heads;
    attention.height = params_.height, attention.width = params_.width;
    attention.d = attention.dv = head_dim;
    attention.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
    attention.logit = params_.logit, attention.v2h = params_.v2h, attention.h2v = params_.h2v;
    attention.threads = threads_;
    View out = heads(space_.attended, dim, head_dim);
    return params_.full ? ppma_polyline_attention(&attention, &out, nullptr, nullptr)
                        : ppma_criss_cross_attention(&attention, &out);
  }

  const BlockParams& params_;
  const int threads_;
  const int64_t images_, grid_, tokens_;
  float *const x_, *const out_;
  const Workspace space_;
};

}  // namespace

int ppma::run_blocks(const BlockParams* blocks, int64_t count) {
  const int64_t grid = blocks->height * blocks->width;
  auto images_of = [&](int64_t tokens) { return std::max<int64_t>(1, tokens / grid); };
  auto run = [&](int64_t first, int64_t images, int threads) {
    int64_t floats = 0;
    for (int64_t b = 0; b < count; ++b) floats = std::max(floats, floats_of<Workspace>(blocks[b], images));
    float* memory = Scratch::floats<2>(floats);
    int failed = !memory;
    for (int64_t b = 0; b < count && !failed; ++b) failed = Block(blocks[b], first, images, threads, memory).run();
    Scratch::trim<2>();
    return failed;
  };
  const int64_t alone = grid <= kMostTokensOfThread ? images_of(kTokensOfThread) : 0;
  return for_images(blocks->batch, blocks->threads, alone, images_of(kGroupTokens), run);
}
