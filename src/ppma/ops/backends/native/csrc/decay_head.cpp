// Decay heads in training: log-decays -rate * act(w x + bias) of every token and head, with one linear map for all heads, and
// their gradients.
//
// A vector holds the logits of neighbouring tokens, so results are written as the attention reads them, token after token.
// Sums over the tokens are added up in float32 within a task and in float64 over the tasks, whose number depends on the
// shape alone.
#include <algorithm>

#include "decay_activation.h"
#include "parallel.h"
#include "simd.h"
#include "slice_sums.h"
#include "view.h"

using namespace ppma;

namespace {

constexpr int64_t kTaskTokens = 64;  // a multiple of kLanes
constexpr int kMostOutputs = 2;

// Mirrors `_PARAMS` of decay_head.py.
struct DecayHeadParams {
  View x;               // (batch, tokens, heads * d), last axis of unit stride
  const float* weight;  // (outputs, d)
  const float* bias;    // (heads, outputs)
  const float* rate;    // (heads, outputs); null for 1
  int64_t batch, tokens, heads, outputs, d;
  int32_t softplus, threads;

  int64_t pieces() const { return (tokens + kTaskTokens - 1) / kTaskTokens; }
  int64_t tasks() const { return batch * pieces(); }
  bool whole() const { return d % kLanes == 0; }
  // What a task sums up: gradients of weight, bias and rate.
  int64_t sums() const { return outputs * d + 2 * heads * outputs; }
};

// Mirrors `_GRADIENTS` of decay_head.py. Null pointers stand for zeros.
struct DecayHeadGradients {
  View out[kMostOutputs];  // of the log-decays, (batch, heads, tokens)
  View add;                // of the tokens' other readers, like x
  float* x;                // contiguous
  float *weight, *bias, *rate;
};

// Up to kLanes neighbouring tokens of one image.
struct Group {
  int64_t image, first;
  int count;
  const float* tokens[kLanes];  // the first channel of each; behind the last one, of the last one
};

template <class Body>
void each_group(const DecayHeadParams& params, int64_t task, Body body) {
  int64_t image = task / params.pieces(), begin = task % params.pieces() * kTaskTokens;
  int64_t end = std::min(params.tokens, begin + kTaskTokens);
  for (int64_t first = begin; first < end; first += kLanes) {
    Group group{image, first, static_cast<int>(std::min<int64_t>(kLanes, end - first)), {}};
    for (int t = 0; t < kLanes; ++t) group.tokens[t] = params.x.at(image, first + std::min(t, group.count - 1), 0, 0);
    body(group);
  }
}

// Fetches the channels of the tokens behind a group, which the hardware does not see coming: a head reads a piece of each.
template <bool kWrite = false>
inline void prefetch_next(const DecayHeadParams& params, const Group& group, const float* tokens, int64_t stride) {
  const int64_t dim = params.heads * params.d;
  for (int64_t t = kLanes; t < 2 * kLanes && group.first + t < params.tokens; ++t)
    for (int64_t c = 0; c < dim; c += kCacheLine) __builtin_prefetch(tokens + t * stride + c, kWrite);
}

// Lanes that exist of the vector at channel c of a head; kWhole says that all do.
template <bool kWhole>
inline int lanes_at(int64_t c, int64_t d) {
  return kWhole ? kLanes : static_cast<int>(std::min<int64_t>(kLanes, d - c));
}

// The logits of a group for one head; of tokens that do not exist those of the last one.
template <int kOutputs, bool kWhole>
inline void logits(const DecayHeadParams& params, const Group& group, int64_t head, Vec (&results)[kOutputs]) {
  const int64_t d = params.d;
  slice_sums<kOutputs>(
      0, d, [=](int64_t c) { return head * d + c; },
      [&](int t, int64_t c, int64_t place) { return load_lanes(group.tokens[t] + place, lanes_at<kWhole>(c, d)); },
      [&](int o, int64_t c) { return load_lanes(params.weight + o * d + c, lanes_at<kWhole>(c, d)); }, results);
#pragma GCC unroll 2
  for (int o = 0; o < kOutputs; ++o) results[o] += params.bias[head * kOutputs + o];
}

// Log-decays of a group.
template <int kOutputs, bool kWhole>
void group_log_decays(const DecayHeadParams& params, const Group& group, float* out) {
  prefetch_next(params, group, group.tokens[0], params.x.stride[1]);
  for (int64_t head = 0; head < params.heads; ++head) {
    Vec of_head[kOutputs];
    logits<kOutputs, kWhole>(params, group, head, of_head);
    for (int o = 0; o < kOutputs; ++o) {
      Vec value = decay_activation(of_head[o], params.softplus).value;
      float rate = params.rate ? params.rate[head * kOutputs + o] : 1.0f;
      int64_t line = (o * params.batch + group.image) * params.heads + head;
      store_lanes(out + line * params.tokens + group.first, -rate * value, group.count);
    }
  }
}

// The gradients of a group: that of its tokens is written, the others are added to the sums of the task.
template <int kOutputs, bool kWhole>
void group_gradients(const DecayHeadParams& params, const DecayHeadGradients& gradients, const Group& group, float* sums) {
  const int64_t d = params.d, dim = params.heads * d;
  const IntVec exists = lane_index() < group.count;
  float *of_weight = sums, *of_bias = sums + kOutputs * d, *of_rate = of_bias + params.heads * kOutputs;
  const int64_t x_stride = params.x.stride[1], add_stride = gradients.add.stride[1];
  const float* x = params.x.at(group.image, group.first, 0, 0);
  const float* add = gradients.add.data ? gradients.add.at(group.image, group.first, 0, 0) : nullptr;
  float* grad_x = gradients.x + (group.image * params.tokens + group.first) * dim;
  prefetch_next(params, group, x, x_stride);
  if (add) prefetch_next(params, group, add, add_stride);
  prefetch_next<true>(params, group, grad_x, dim);
  for (int64_t head = 0; head < params.heads; ++head) {
    float moved[kOutputs][kLanes];  // the gradients of the logits
    Vec of_head[kOutputs];
    logits<kOutputs, kWhole>(params, group, head, of_head);
    for (int o = 0; o < kOutputs; ++o) {
      const View& out = gradients.out[o];
      Vec grad{};
      if (out.data && out.stride[2] == 1) {
        grad = load_lanes(out.at(group.image, head, group.first, 0), group.count);
      } else if (out.data) {
        for (int t = 0; t < group.count; ++t) grad[t] = *out.at(group.image, head, group.first + t, 0);
      }
      Activation act = decay_activation(of_head[o], params.softplus);
      int64_t at = head * kOutputs + o;
      Vec of_logit = select(exists, -(params.rate ? params.rate[at] : 1.0f) * act.slope * grad, Vec{});
      store(moved[o], of_logit);
      of_bias[at] += sum(of_logit);
      of_rate[at] -= sum(select(exists, act.value * grad, Vec{}));
    }
    for (int64_t c = 0; c < d; c += kLanes) {
      const int lanes = lanes_at<kWhole>(c, d);
      Vec weight[kOutputs], total[kOutputs];
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; ++o) {
        weight[o] = load_lanes(params.weight + o * d + c, lanes);
        total[o] = load_lanes(of_weight + o * d + c, lanes);
      }
      for (int t = 0; t < group.count; ++t) {
        Vec here = load_lanes(x + t * x_stride + head * d + c, lanes);
        Vec grad = add ? load_lanes(add + t * add_stride + head * d + c, lanes) : Vec{};
#pragma GCC unroll 2
        for (int o = 0; o < kOutputs; ++o) {
          grad += moved[o][t] * weight[o];
          total[o] += moved[o][t] * here;
        }
        store_lanes(grad_x + t * dim + head * d + c, grad, lanes);
      }
#pragma GCC unroll 2
      for (int o = 0; o < kOutputs; ++o) store_lanes(of_weight + o * d + c, total[o], lanes);
    }
  }
}

}  // namespace

// out is (outputs, batch, heads, tokens), contiguous.
PPMA_EXPORT int ppma_decay_head(const DecayHeadParams* given, float* out) {
  const DecayHeadParams& params = *given;
  auto run = params.whole() ? (params.outputs == 1 ? group_log_decays<1, true> : group_log_decays<2, true>)
                            : (params.outputs == 1 ? group_log_decays<1, false> : group_log_decays<2, false>);
  parallel_for(params.tasks(), params.threads,
               [&](int64_t task) { each_group(params, task, [&](const Group& group) { run(params, group, out); }); });
  return 0;
}

PPMA_EXPORT int ppma_decay_head_backward(const DecayHeadParams* given, const DecayHeadGradients* gradients) {
  const DecayHeadParams& params = *given;
  const int64_t sums = params.sums();
  // One more than needed: of nothing calloc may return null.
  auto* partial = static_cast<float*>(std::calloc(params.tasks() * sums + 1, sizeof(float)));
  if (!partial) return 1;
  auto run = params.whole() ? (params.outputs == 1 ? group_gradients<1, true> : group_gradients<2, true>)
                            : (params.outputs == 1 ? group_gradients<1, false> : group_gradients<2, false>);
  parallel_for(params.tasks(), params.threads, [&](int64_t task) {
    each_group(params, task, [&](const Group& group) { run(params, *gradients, group, partial + task * sums); });
  });
  const int64_t of_weight = params.outputs * params.d, of_head = params.heads * params.outputs;
  for (int64_t at = 0; at < sums; ++at) {
    double total = 0;
    for (int64_t task = 0; task < params.tasks(); ++task) total += partial[task * sums + at];
    if (at < of_weight)
      gradients->weight[at] = static_cast<float>(total);
    else if (at < of_weight + of_head)
      gradients->bias[at - of_weight] = static_cast<float>(total);
    else if (gradients->rate)
      gradients->rate[at - of_weight - of_head] = static_cast<float>(total);
  }
  std::free(partial);
  return 0;
}
