// What trains the projection of an attention: the gradients of q, k, v and the log-decays, as those of the rows of one
// linear layer, whose outputs are q and k before they are rotated, v, and the logits of the decays.
//
// Sums over the tokens are added up in float32 within a task and in float64 over the tasks, whose number depends on the
// shape alone.
#include <algorithm>
#include <cstring>

#include "decay_activation.h"
#include "parallel.h"
#include "product.h"
#include "rotary.h"
#include "simd.h"
#include "view.h"

using namespace ppma;

namespace {

constexpr int64_t kTaskTokens = 64;  // a multiple of kLanes
constexpr int kMostOutputs = 2;

// Mirrors `_PARAMS` of projection.py. Views without data stand for zeros.
struct Params {
  View q, k, v, again;        // (batch, tokens, dim): what attention sends back, and the other reader of v
  View decays[kMostOutputs];  // (batch, heads, tokens)
  const float *cosine, *sine;  // (tokens, d / 2)
  const float* logits;         // (batch, heads, outputs, tokens)
  const float* rate;           // (heads, outputs); null for 1
  float* rows;                 // (batch * tokens, stride): q, k, v, and the logits (heads, outputs) in whole vectors
  float* of_rate;              // (heads, outputs); null where it is not wanted
  int64_t batch, tokens, heads, outputs, d, stride;
  int32_t softplus, threads;

  int64_t dim() const { return heads * d; }
  int64_t logits_of_token() const { return heads * outputs; }
  int64_t pieces() const { return (tokens + kTaskTokens - 1) / kTaskTokens; }
  int64_t tasks() const { return batch * pieces(); }
};

// Some tokens of an image.
struct Piece {
  int64_t image, first, count;
};

// dim channels of every token, the sum of two views or one of them.
void copy_channels(const Params& params, const Piece& piece, const View& from, const View* plus, float* to) {
  const int64_t dim = params.dim(), whole = dim / kLanes * kLanes;
  const int rest = static_cast<int>(dim - whole);
  for (int64_t t = 0; t < piece.count; ++t, to += params.stride) {
    if (!from.data) {
      std::fill_n(to, dim, 0.0f);
      continue;
    }
    const float* first = from.at(piece.image, piece.first + t, 0, 0);
    if (!plus) {
      std::memcpy(to, first, sizeof(float) * dim);
      continue;
    }
    const float* second = plus->at(piece.image, piece.first + t, 0, 0);
    for (int64_t c = 0; c < whole; c += kLanes) store(to + c, load(first + c) + load(second + c));
    if (rest) store_part(to + whole, load_part(first + whole, rest) + load_part(second + whole, rest), rest);
  }
}

// The gradients of the logits, to the rows at `to`; those of the rates are added to `of_rate`.
void logit_gradients(const Params& params, const Piece& piece, float* columns, float* to, float* of_rate) {
  for (int64_t c = 0; c < params.logits_of_token(); ++c) {
    const int64_t head = c / params.outputs;
    const View& grads = params.decays[c % params.outputs];
    const float* logits = params.logits + (piece.image * params.logits_of_token() + c) * params.tokens + piece.first;
    const float rate = params.rate ? params.rate[c] : 1.0f;
    Vec total{};
    for (int64_t t = 0; t < piece.count; t += kLanes) {
      const int lanes = static_cast<int>(std::min<int64_t>(kLanes, piece.count - t));
      Vec grad{};
      if (grads.data && grads.stride[2] == 1) {
        grad = load_lanes(grads.at(piece.image, head, piece.first + t, 0), lanes);
      } else if (grads.data) {
        for (int lane = 0; lane < lanes; ++lane) grad[lane] = *grads.at(piece.image, head, piece.first + t + lane, 0);
      }
      Activation act = decay_activation(load_lanes(logits + t, lanes), params.softplus);
      store(columns + c * kTaskTokens + t, -rate * act.slope * grad);
      total += select(lane_index() < lanes, act.value * grad, Vec{});
    }
    of_rate[c] = -sum(total);
  }
  pack_columns(columns, kTaskTokens, params.logits_of_token(), piece.count, 1.0f, to, params.stride);
}

}  // namespace

PPMA_EXPORT int ppma_projection_gradient(const Params* given) {
  const Params& params = *given;
  const int64_t dim = params.dim(), count = params.logits_of_token();
  // One more than needed: of nothing calloc may return null.
  auto* partial = static_cast<float*>(std::calloc(params.tasks() * count + 1, sizeof(float)));
  if (!partial) return 1;
  std::atomic<bool> failed{false};
  parallel_for(params.tasks(), params.threads, [&](int64_t task) {
    float* columns = count ? Scratch::floats(count * kTaskTokens) : nullptr;
    if (count && !columns) {
      failed = true;
      return;
    }
    const int64_t first = task % params.pieces() * kTaskTokens;
    const Piece piece{task / params.pieces(), first, std::min(kTaskTokens, params.tokens - first)};
    float* rows = params.rows + (piece.image * params.tokens + first) * params.stride;
    copy_channels(params, piece, params.q, nullptr, rows);
    copy_channels(params, piece, params.k, nullptr, rows + dim);
    const bool both = params.v.data && params.again.data;
    copy_channels(params, piece, params.v.data ? params.v : params.again, both ? &params.again : nullptr, rows + 2 * dim);
    const Rotation rotation{params.cosine, params.sine, 2 * dim, params.d, params.tokens};
    for (int64_t column = 0; column < 2 * dim; column += kLanes)
      rotate<1>(rotation, rows, params.stride, first, piece.count, column, -1.0f);
    if (count) logit_gradients(params, piece, columns, rows + 3 * dim, partial + task * count);
  });
  for (int64_t c = 0; c < count && params.of_rate; ++c) {
    double total = 0;
    for (int64_t task = 0; task < params.tasks(); ++task) total += partial[task * count + c];
    params.of_rate[c] = static_cast<float>(total);
  }
  std::free(partial);
  Scratch::trim();
  return failed;
}

// The gradient of a map (outputs, d) of each head's slice of a token, from that of all of its matrix, (heads * outputs,
// heads * d).
PPMA_EXPORT int ppma_slice_gradient(const float* matrix, int64_t heads, int64_t outputs, int64_t d, float* to) {
  std::fill_n(to, outputs * d, 0.0f);
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t o = 0; o < outputs; ++o) {
      const float* from = matrix + (head * outputs + o) * heads * d + head * d;
      for (int64_t c = 0; c < d; ++c) to[o * d + c] += from[c];
    }
  return 0;
}
