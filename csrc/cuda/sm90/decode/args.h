// Arguments of the decoding kernel, and the division of a sequence's keys among the CTAs of a cluster.
#pragma once

#include "cuda/kvcache/args.h"

namespace flash_dmattn::cuda::sm90 {

// A CTA has 8 warps (two CTAs per SM up to head dimension 128), or 16 up to head dimension 128.
constexpr int kDecodeMinWarps = 8, kDecodeMaxWarps = 16;
constexpr int kDecodeManyWarpsHeadDim = 128;
constexpr int kDecodeMaxRows = 64;     // query rows times query heads of a KV head
constexpr int kDecodeMaxCluster = 16;  // above 8 is not portable
constexpr int kDecodeGroup = 8;        // neighbouring keys of a thread that reads biases
constexpr int kScanGroup = 16;         // and of a lane that scans their orders
constexpr int kDecodeSegmentAlign = 32 * kScanGroup;
constexpr int kInvariantKeys = 8192;  // batch_invariant: keys of a part, until there are kInvariantParts
constexpr int kInvariantParts = 4;

// A kernel parameter: compiled kernels depend on the order of the members, here, in KvCacheArgs and in KvCacheParams.
struct DecodeArgs : KvCacheArgs {
    using KvCacheArgs::KvCacheArgs;

    float score_scale = 1;         // softmax_scale; with a softcap, what tanh takes
    float score_cap = 0;           // softcap
    int warps = kDecodeMinWarps;   // of a CTA
    int cluster = 1;               // CTAs of a sequence and KV head
    int order_capacity = 0;        // orders of biases that fit in a CTA's shared memory; 0: dense
    int list_capacity = 0;         // selected keys of a CTA
    int max_rows = 1;              // sequences of more query rows are skipped
    int query_tiles = 1;           // 16-row tiles of Q in shared memory
    bool overlays = false;         // the tiles of K and V reuse the memory of the orders
    bool has_vector_bias = false;  // eight neighbouring biases are aligned to 16 bytes
};

// batch_invariant: the parts of a sequence's (selected) keys, one for each CTA that attends, are a function of its keys
// alone; never more for fewer keys. More CTAs may select: their number does not change which keys, or their order.
__host__ __device__ inline int invariant_parts(int64_t keys) {
    int parts = 1;
    while (parts < kInvariantParts && keys > int64_t{parts} * kInvariantKeys) parts *= 2;
    return parts;
}

// Keys of a CTA in the selection.
__host__ __device__ inline int decode_share(int keys, int cluster) {
    constexpr int kAlign = 64;
    return ceil_div(ceil_div(keys, cluster), kAlign) * kAlign;
}

// Positions of a warp in the selection.
__host__ __device__ inline int decode_segment(int share, int warps) {
    return ceil_div(share, warps * kDecodeSegmentAlign) * kDecodeSegmentAlign;
}

}  // namespace flash_dmattn::cuda::sm90
