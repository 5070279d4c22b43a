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

// Of what one convolution leaves to the next, for each thread.
constexpr int64_t kGroupFloats = 1 << 18, kMostFloatsOfThread = 1 << 22;

// Mirrors fused_layers.py.
enum Kind : uint8_t { kBlock, kConv, kWinogradConv };

// The parameters of all layers lie one behind the other, and contain pointers.
static_assert(sizeof(BlockParams) % 8 == 0 && sizeof(PackedConvParams) % 8 == 0, "");

// `count` convolutions, each of which reads what the one before it wrote: of the same batch. Only the first has an x.data and
// only the last an out. A few images at a time pass all of them, through the scratch memory that blocks use too, so a batch
// needs no more memory than that.
int run_convs(const uint8_t* kinds, const PackedConvParams* convs, int64_t count) {
  int64_t largest = 0;  // of the results of an image between two convolutions
  for (int64_t c = 0; c < count - 1; ++c) largest = std::max(largest, (convs[c].image_floats() + 15) / 16 * 16);
  auto run = [&](int64_t first, int64_t images, int threads) {
    float* memory = largest ? Scratch::floats<2>(2 * images * largest) : nullptr;
    int failed = largest && !memory;
    float* from = convs->x.data + first * convs->x.stride[0];
    for (int64_t c = 0; c < count && !failed; ++c) {
      PackedConvParams conv = convs[c];
      conv.batch = images;
      conv.threads = threads;
      conv.x.data = from;
      conv.out = c == count - 1 ? conv.out + first * conv.image_floats() : memory + c % 2 * images * largest;
      failed = kinds[c] == kConv ? ppma_packed_conv(&conv) : ppma_winograd_conv(&conv);
      from = conv.out;
    }
    Scratch::trim<2>();
    return failed;
  };
  const int threads = convs->threads;
  // Without memory between them there is nothing to keep small.
  auto images_of = [&](int64_t floats) { return largest ? std::max<int64_t>(1, floats / largest) : std::max<int64_t>(1, convs->batch); };
  const int64_t alone = largest <= kMostFloatsOfThread ? images_of(kGroupFloats) : 0;
  return for_images(convs->batch, threads, alone, images_of(kGroupFloats * threads), run);
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
