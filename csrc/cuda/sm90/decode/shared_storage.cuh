// Shared memory of the decoding kernel, in this order: DecodeSharedStorage, Q, the list of selected keys, the biases or
// their orders, the candidates of each warp, the tiles of K and V. Without `overlays` the tiles reuse the memory of the
// selection's histograms; with it they begin at the orders.
#pragma once

#include "args.h"
#include "cuda/arch/smem_tile.cuh"
#include "cuda/topk/order_group.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kDecodeSegments = kDecodeMaxCluster * kDecodeMaxWarps;

struct alignas(128) DecodeSharedStorage {
    alignas(16) uint32_t histogram[kBins];   // of the current digit, summed over the CTAs
    alignas(8) uint64_t histogram_ready[2];  // of even and of odd rounds: the CTAs' histograms have arrived
    alignas(8) uint64_t counts_ready;        // segment_counts has arrived
    alignas(16) uint16_t samples[kDecodeMaxWarps * 32];    // orders, one for each thread
    int sample_counts[2][16];                              // [buffer][value]: samples that reach it
    int equal_counts[kDecodeMaxWarps];                     // of each warp: keys equal to the threshold
    alignas(16) uint32_t segment_counts[kDecodeSegments];  // selected keys of each warp of each CTA
    float warp_max[kDecodeMaxWarps][kDecodeTileRows], warp_sum[kDecodeMaxWarps][kDecodeTileRows];
    // The results of each split, at the index of its first warps; the other CTAs read them.
    float row_max[kDecodeMaxWarps][kDecodeTileRows], row_sum[kDecodeMaxWarps][kDecodeTileRows];
};

// Bytes of tiles. There is memory for a tile of K and one of V for each warp, 16 keys each; later it holds the warp's
// output.
__host__ __device__ constexpr int decode_tile_bytes(int head_dim) { return 16 * head_dim * 2; }
__host__ __device__ constexpr int decode_query_bytes(int head_dim) { return kDecodeTileRows * head_dim * 2; }
// The histograms of DigitExchange: this CTA's, and one received from each CTA, for even and for odd rounds.
__host__ __device__ constexpr int decode_histogram_bytes(int cluster) {
    return 2 * DigitHistogram::kWords * (1 + cluster) * 4;
}

// Offsets in bytes.
struct DecodeSmemLayout {
    int query, list, orders, candidates, histograms, tiles, tile_bytes, total;

    __host__ __device__ DecodeSmemLayout(const DecodeArgs& p, int head_dim) {
        query = sizeof(DecodeSharedStorage);
        list = query + p.query_tiles * decode_query_bytes(head_dim);
        orders = list + ceil_div(p.list_capacity, 32) * 128;
        candidates = orders + p.order_capacity * 2;
        histograms = candidates + p.candidate_capacity * p.warps * 2;
        tiles = p.overlays ? orders : histograms;
        const int selecting = histograms + decode_histogram_bytes(p.cluster);
        tile_bytes = p.warps * 2 * decode_tile_bytes(head_dim);
        const int attending = tiles + tile_bytes;
        total = selecting > attending ? selecting : attending;
    }
};

}  // namespace flash_dmattn::cuda::sm90
