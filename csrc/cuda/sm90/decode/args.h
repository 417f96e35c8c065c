// Arguments of the decoding kernel, and the division of a sequence's keys among the CTAs of a cluster.
#pragma once

#include "cuda/kvcache/args.h"

namespace flash_dmattn::cuda::sm90 {

// A CTA has 8 warps (two CTAs per SM up to head dimension 128), or 16 up to head dimension 128.
constexpr int kDecodeMinWarps = 8, kDecodeMaxWarps = 16;
constexpr int kDecodeManyWarpsHeadDim = 128;
// The CTAs that share an SM.
__host__ __device__ constexpr int max_decode_ctas(int head_dim, int warps) {
    return warps == kDecodeMinWarps && head_dim <= kDecodeManyWarpsHeadDim ? 2 : 1;
}
constexpr int kDecodeMaxRows = 64;     // query rows times query heads of a KV head: packed rows
constexpr int kDecodeTileRows = 8;     // packed rows that a warp computes
constexpr int kDecodeMaxCluster = 16;  // above 8 is not portable
constexpr int kScanGroup = 16;         // neighbouring keys of a lane that scans orders
constexpr int kDecodeSegmentAlign = 32 * kScanGroup;
constexpr int kDecodeMaxCandidates = 1024;  // of a warp
// batch_invariant: kInvariantMinWarps attend to a sequence of up to kInvariantKeys keys, twice as many to one of up to
// twice as many keys, and so on up to kInvariantMaxWarps. A split has kInvariantSplitWarps of them, or one for each
// tile of packed rows if these are more.
constexpr int kInvariantKeys = 8192;
constexpr int kInvariantMinWarps = 8, kInvariantMaxWarps = 32, kInvariantSplitWarps = 2;
static_assert(kInvariantMinWarps >= kDecodeMaxRows / kDecodeTileRows);

// A kernel parameter: compiled kernels depend on the order of the members, here, in KvCacheArgs and in KvCacheParams.
struct DecodeArgs : KvCacheArgs {
    using KvCacheArgs::KvCacheArgs;

    FastDivmod heads_per_kv, kv_heads_divmod;  // H / Hkv, Hkv
    float score_scale = 1;                     // softmax_scale; with a softcap, what tanh takes
    float score_cap = 0;                       // softcap
    int warps = kDecodeMinWarps;               // of a CTA
    int cluster = 1;                           // CTAs of a sequence and KV head
    int order_capacity = 0;                    // positions in a CTA's buffer of orders; 0: no selection
    int candidate_capacity = 0;                // candidates of a warp (candidates.cuh); 0: all keys are counted
    int list_capacity = 0;                     // selected keys of a CTA
    int max_rows = 1;                          // sequences of more query rows are skipped
    int query_tiles = 1;                       // tiles of kDecodeTileRows rows of Q in shared memory
    bool overlays = false;                     // the tiles of K and V reuse the memory of the orders
    bool has_vector_bias = false;              // eight neighbouring biases are aligned to 16 bytes
    // One query row in one tile, no softcap, no relative bias; biases, if any, of 16 bits and aligned
    // (has_vector_bias). The kernel of such calls is smaller: fetching instructions takes much of the time.
    bool is_plain = false;
};

// batch_invariant: the warps that attend to a sequence, in all CTAs of its cluster: a function of its keys alone.
__host__ __device__ inline int invariant_warps(int64_t keys) {
    int warps = kInvariantMinWarps;
    while (warps < kInvariantMaxWarps && keys > int64_t{warps / kInvariantMinWarps} * kInvariantKeys) warps *= 2;
    return warps;
}

// The splits into which a cluster divides the (selected) keys of a sequence: one for each CTA; with batch_invariant
// their number depends on the sequence alone. The warps of a split share its keys.
struct DecodeSplits {
    int warps;    // of a split
    int count;    // of the cluster
    int per_cta;  // at most: the last CTAs may have none

    // All three are powers of 2, as the cluster is.
    __host__ __device__ DecodeSplits(const DecodeArgs& p, int64_t keys, int query_tiles)
        : warps(p.warps), count(p.cluster), per_cta(1) {
        if (!p.batch_invariant) return;
        warps = query_tiles > kInvariantSplitWarps ? query_tiles : kInvariantSplitWarps;
        count = div_by_power(invariant_warps(keys), warps);
        per_cta = ceil_div_by_power(count, p.cluster);
    }
    // Keys of a split, of `keys` in all.
    __host__ __device__ int share(int keys) const { return ceil_div(ceil_div_by_power(keys, count), 16) * 16; }
};

// Keys of a CTA in the selection.
__host__ __device__ inline int decode_share(int keys, int cluster) {
    constexpr int kAlign = 64;
    return ceil_div(ceil_div_by_power(keys, cluster), kAlign) * kAlign;
}

// Tiles of a sequence's packed rows: a power of 2.
__host__ __device__ inline int decode_tiles(int64_t packed_rows) {
    int tiles = 1;
    while (tiles * kDecodeTileRows < packed_rows) tiles *= 2;
    return tiles;
}

// Positions of a warp in the selection.
__host__ __device__ inline int decode_segment(int share, int warps) {
    return ceil_div(share, warps * kDecodeSegmentAlign) * kDecodeSegmentAlign;
}

// The keys of a CTA in the selection; each of its warps has a segment of them.
struct SelectionShare {
    int per_cta;  // keys of a CTA, except the last ones
    int begin;    // its first key
    int keys;     // with new ones
    int cached;   // those in the cache
    int segment;  // positions of a warp

    __device__ SelectionShare(int all_keys, int all_cached, int cluster, int warps, int rank)
        : per_cta(decode_share(all_keys, cluster)), begin(min(rank * per_cta, all_keys)),
          keys(min(per_cta, all_keys - begin)), cached(max(min(keys, all_cached - begin), 0)),
          segment(decode_segment(per_cta, warps)) {}
};

}  // namespace flash_dmattn::cuda::sm90
