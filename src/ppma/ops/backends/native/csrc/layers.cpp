// Convolutions and blocks of a backbone that follow one another, in one call: after a large kernel Python finds nothing of
// itself in the cache, and between small ones it would take a good part of the time.
#include <algorithm>

#include "block.h"
#include "packed_conv.h"
#include "parallel.h"

using namespace ppma;

PPMA_EXPORT int ppma_packed_conv(const PackedConvParams* params);
PPMA_EXPORT int ppma_winograd_conv(const PackedConvParams* params);

namespace {

constexpr int64_t kGroupFloats = 1 << 18;  // for each thread, of what one convolution leaves to the next

// Mirrors fused_layers.py.
enum Kind : uint8_t { kBlock, kConv, kWinogradConv };

// The parameters of all layers lie one behind the other, and contain pointers.
static_assert(sizeof(BlockParams) % 8 == 0 && sizeof(PackedConvParams) % 8 == 0, "");

// `count` convolutions, each of which reads what the one before it wrote: of the same batch. Only the first has an x.data and
// only the last an out. A few images at a time pass all of them, through the scratch memory that blocks use too, so a batch
// needs no more memory than that.
int run_convs(const uint8_t* kinds, const PackedConvParams* convs, int64_t count) {
  const int64_t batch = convs->batch;
  if (batch == 0) return 0;
  int64_t largest = 0;  // of the results of an image between two convolutions
  for (int64_t c = 0; c < count - 1; ++c) largest = std::max(largest, (convs[c].image_floats() + 15) / 16 * 16);
  const int64_t group = largest ? std::max<int64_t>(1, kGroupFloats * convs->threads / largest) : batch;
  float* memory = largest ? Scratch::floats<2>(2 * std::min(group, batch) * largest) : nullptr;
  if (largest && !memory) return 1;
  for (int64_t first = 0; first < batch; first += group) {
    float* from = convs->x.data + first * convs->x.stride[0];
    for (int64_t c = 0; c < count; ++c) {
      PackedConvParams conv = convs[c];
      conv.batch = std::min(group, batch - first);
      conv.x.data = from;
      conv.out = c == count - 1 ? conv.out + first * conv.image_floats() : memory + c % 2 * conv.batch * largest;
      if (kinds[c] == kConv ? ppma_packed_conv(&conv) : ppma_winograd_conv(&conv)) return 1;
      from = conv.out;
    }
  }
  Scratch::trim<2>();
  return 0;
}

}  // namespace

// `params` has BlockParams or PackedConvParams for each of `count` kinds.
PPMA_EXPORT int ppma_layers(const uint8_t* kinds, const char* params, int64_t count) {
  int failed = 0;
  for (int64_t first = 0, end = 0; first < count && !failed; first = end) {
    const bool blocks = kinds[first] == kBlock;
    while (end < count && (kinds[end] == kBlock) == blocks) ++end;
    failed = blocks ? run_blocks(reinterpret_cast<const BlockParams*>(params), end - first)
                    : run_convs(kinds + first, reinterpret_cast<const PackedConvParams*>(params), end - first);
    params += (end - first) * (blocks ? sizeof(BlockParams) : sizeof(PackedConvParams));
  }
  return failed;
}
