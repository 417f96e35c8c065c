// What the kernels for a dense bias that batch elements share have in common: how the work is cut, and what is handed over.
#pragma once

#include <cuda.h>

#include "cuda/mask/block_mask_iterator.cuh"
#include "cuda/plan.h"
#include "cuda/arch/smem_descriptor.cuh"
#include "config.h"
#include "cuda/arch/pipeline.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasCols = 64;  // of a tile of biases, 64 rows by 64 keys
template <typename T>
using PairBiasSmemTile = SmemTile<T, 64, kPairBiasCols>;

// A block goes over some of the batch elements that share a bias, with one tile of one head's rows (or keys).
struct PairBiasSchedule {
    int tiles;       // of a head
    int sharers;     // of one bias
    int splits;      // parts that they are cut into
    int bias_tiles;  // of 64 keys (or rows), of the whole other side
    float scale;

    PairBiasSchedule(const AttentionParams& p, int64_t tiles, int64_t bias_tiles, int64_t splits)
        : tiles(static_cast<int>(tiles)),
          sharers(static_cast<int>(pair_bias_batch_group_size(p))),
          splits(static_cast<int>(splits)),
          bias_tiles(static_cast<int>(bias_tiles)),
          scale(static_cast<float>(p.softmax_scale)) {}
    // In as many parts as are best.
    PairBiasSchedule(const AttentionParams& p, int64_t tiles, int64_t bias_tiles)
        : PairBiasSchedule(p, tiles, bias_tiles,
                           pair_bias_splits(tiles * p.heads * p.bias.batches, pair_bias_batch_group_size(p))) {}

    int64_t blocks(const AttentionParams& p) const { return tiles * p.heads * p.bias.batches * splits; }
};

struct PairBiasWorkTile {
    int tile, head, bias_batch, split;
    int begin, end;  // of the batch elements

    __device__ PairBiasWorkTile(const PairBiasSchedule& schedule, int heads, int biases) {
        const int index = static_cast<int>(blockIdx.x);
        tile = index % schedule.tiles;
        head = index / schedule.tiles % heads;
        bias_batch = index / schedule.tiles / heads % biases;
        split = index / schedule.tiles / heads / biases;
        const auto begin_of = [&](int part) {
            const auto before = static_cast<int64_t>(schedule.sharers) * part / schedule.splits;
            return bias_batch * schedule.sharers + static_cast<int>(before);
        };
        begin = begin_of(split);
        end = begin_of(split + 1);
    }
};

// What the loading warps tell of a batch element. Bit t: whether tile t of the other side is visited, and whether nothing of
// it is hidden.
struct PairBiasActiveBlocks {
    uint32_t visited, full;
};

// Whether tiles of kKeys keys may not be full. If not, the second warp has nothing to do with keys.
template <int kKeys>
__device__ __forceinline__ bool pair_bias_hides_keys(const AttentionParams& p) {
    return p.packed_mask.bits != nullptr || p.seqlen_k % kKeys != 0;
}

// What a key mask says of a batch element's keys, a tile of kKeys a lane. All lanes of a warp call.
template <int kKeys>
struct PairBiasKeys {
    BlockSummary<kKeys> summary;
    PairBiasActiveBlocks visits;

    __device__ PairBiasKeys(const AttentionParams& p, int batch, int head) {
        const int tile = lane_id(), keys = static_cast<int>(p.seqlen_k);
        summary.full = tile * kKeys < keys;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) summary.columns[w] = 0;
        if (summary.full) {
            summary = MaskSummaries<64, kKeys>(p, Sequence(p, batch), head).of(0, 0, tile);
            summary.full &= (tile + 1) * kKeys <= keys;
#pragma unroll
            for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w)
                summary.columns[w] &= bits_below(keys - tile * kKeys, w);
        }
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < BlockSummary<kKeys>::kWords; ++w) any |= summary.columns[w];
        visits.visited = __ballot_sync(~0u, any != 0);
        visits.full = __ballot_sync(~0u, summary.full);
    }
    // Word w of a tile's columns.
    __device__ __forceinline__ uint32_t columns(int tile, int w) const {
        return __shfl_sync(~0u, summary.columns[w], tile);
    }
};

// Rows of a tile to zeros where `hidden`: what is hidden may be NaN, and 0 times NaN would reach a sum.
template <typename Traits>
__device__ __forceinline__ void clear_row(Traits& tile, int row) {
    static_assert(Traits::kSlabs == 1);
#pragma unroll
    for (int chunk = 0; chunk < Traits::kSlabChunks; ++chunk)
        *reinterpret_cast<uint4*>(tile.data + Traits::offset(row, chunk)) = {};
}

// Which of kKeys keys are visible, as factors, for the lanes that hold them: [c][2 n + e] is of the key 8 n + 2 c + e.
template <int kKeys>
struct PairBiasKeyFactors {
    alignas(16) float factors[4][kKeys / 4 + 4];  // rows begin in different banks

    __device__ __forceinline__ void set(int key, bool is_visible) {
        factors[key % 8 / 2][key / 8 * 2 + key % 2] = is_visible ? 1.f : 0.f;
    }
    // Of this lane's keys in the tiles n and n + 1 of an accumulator, n even.
    __device__ __forceinline__ float4 of(int n) const {
        return *reinterpret_cast<const float4*>(&factors[lane_id() % 4][2 * n]);
    }
};

}  // namespace flash_dmattn::cuda::sm90
