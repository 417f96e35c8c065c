// What the pair bias kernels share: work tiles, active blocks and key masks.
#pragma once

#include <cuda.h>

#include "cuda/arch/pipeline.cuh"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"
#include "cuda/sm90/splits.h"
#include "config.h"

namespace flash_dmattn::cuda::sm90 {

// How a call is cut into work tiles.
struct PairBiasSchedule {
    int num_blocks;        // m_blocks (dK and dV: n_blocks) of a head
    int batch_group_size;  // batch elements that share a bias
    int num_splits;        // of a batch group
    int bias_blocks;       // 64-wide, along the other sequence dimension
    float scale;

    PairBiasSchedule(const AttentionParams& p, int64_t num_blocks, int64_t bias_blocks, int64_t num_splits)
        : num_blocks(static_cast<int>(num_blocks)), batch_group_size(static_cast<int>(p.bias.batch_group_size)),
          num_splits(static_cast<int>(num_splits)), bias_blocks(static_cast<int>(bias_blocks)),
          scale(static_cast<float>(p.softmax_scale)) {}
    PairBiasSchedule(const AttentionParams& p, int64_t num_blocks, int64_t bias_blocks)
        : PairBiasSchedule(p, num_blocks, bias_blocks,
                           choose_splits(num_blocks * p.heads * p.bias.batches, p.bias.batch_group_size)) {}

    int64_t num_ctas(const AttentionParams& p) const { return num_blocks * p.heads * p.bias.batches * num_splits; }
};

// One CTA's work tile: an m_block (dK and dV: n_block) of one head, for one split of a batch group.
struct PairBiasWorkTile {
    int block, head, bias_batch, split;
    int batch_begin, batch_end;

    __device__ PairBiasWorkTile(const PairBiasSchedule& schedule, int heads, int bias_batches) {
        const int index = static_cast<int>(blockIdx.x);
        block = index % schedule.num_blocks;
        head = index / schedule.num_blocks % heads;
        bias_batch = index / schedule.num_blocks / heads % bias_batches;
        split = index / schedule.num_blocks / heads / bias_batches;
        const auto begin_of = [&](int i) {
            const auto before = static_cast<int64_t>(schedule.batch_group_size) * i / schedule.num_splits;
            return bias_batch * schedule.batch_group_size + static_cast<int>(before);
        };
        batch_begin = begin_of(split);
        batch_end = begin_of(split + 1);
    }
};

// A batch element's n_blocks. Bit i: whether any key of n_block i is visible, and whether all are.
struct PairBiasActiveBlocks {
    uint32_t active, full;
};

// Whether an n_block of kKeys keys may have masked keys. If not, no producer warp zeros them.
template <int kKeys>
__device__ __forceinline__ bool pair_bias_masks_keys(const AttentionParams& p) {
    return p.packed_mask.present() || p.seqlen_k % kKeys != 0;
}

// A batch element's key mask: lane i holds n_block i. All lanes of a warp call.
template <int kKeys>
struct PairBiasKeyMask {
    BlockSummary<kKeys> summary;
    PairBiasActiveBlocks blocks;

    __device__ PairBiasKeyMask(const AttentionParams& p, int batch, int head) {
        const int n_block = lane_id(), keys = static_cast<int>(p.seqlen_k);
        summary.full = n_block * kKeys < keys;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) summary.visible_keys[w] = 0;
        if (summary.full) {
            summary = MaskSummaries<64, kKeys>(p, Sequence(p, batch), head).of(0, 0, n_block);
            summary.full &= (n_block + 1) * kKeys <= keys;
#pragma unroll
            for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w)
                summary.visible_keys[w] &= bits_below(keys - n_block * kKeys, w);
        }
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) any |= summary.visible_keys[w];
        blocks.active = __ballot_sync(~0u, any != 0);
        blocks.full = __ballot_sync(~0u, summary.full);
    }
    // Word w of an n_block's visible keys.
    __device__ __forceinline__ uint32_t visible_keys(int n_block, int w) const {
        return __shfl_sync(~0u, summary.visible_keys[w], n_block);
    }
};

// Zeros a row of a tile. A masked row or key may be NaN, and 0 * NaN is NaN.
template <typename Tile>
__device__ __forceinline__ void zero_row(Tile& tile, int row) {
    static_assert(Tile::kSlabs == 1);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kSlabChunks; ++chunk)
        *reinterpret_cast<uint4*>(tile.data + Tile::offset(row, chunk)) = {};
}

// Arrives at the barrier for a warp, after a proxy fence: GEMMs may read what the warp has written.
__device__ __forceinline__ void fence_and_arrive(uint64_t& barrier) {
    fence_proxy_async();
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(smem_address(&barrier));
}

// Visibility of kKeys keys as factors, 1 or 0, in the order of accumulator fragments: [c][2 n + e] is key 8 n + 2 c +
// e.
template <int kKeys>
struct PairBiasKeyFactors {
    alignas(16) float factors[4][kKeys / 4 + 4];  // padded against bank conflicts

    __device__ __forceinline__ void set(int key, bool is_visible) {
        factors[key % 8 / 2][key / 8 * 2 + key % 2] = is_visible ? 1.f : 0.f;
    }
    // This lane's keys in fragments n and n + 1, n even.
    __device__ __forceinline__ float4 of(int n) const {
        return *reinterpret_cast<const float4*>(&factors[lane_id() % 4][2 * n]);
    }
};

}  // namespace flash_dmattn::cuda::sm90
