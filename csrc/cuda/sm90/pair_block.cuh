// What the kernels for a dense bias that batch elements share have in common: how the work is cut, and what is handed over.
#pragma once

#include <cuda.h>

#include "../common/tile_scan.cuh"
#include "../plan.h"
#include "operand.cuh"
#include "pair_config.h"
#include "ring.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kPairBiasCols = 64;  // of a tile of biases, 64 rows by 64 keys
template <typename T>
using PairBiasTile = SmemTile<T, 64, kPairBiasCols>;

// The works, one for each head, tile of its rows (or keys) and batch element, are in this order; each block does as many as
// the others, one after the other, so that most have their biases in common with the work before.
struct PairSchedule {
    int64_t works;
    int tiles;  // of a head
    int batch;
    int bias_tiles;  // of 64 keys (or rows), of the whole other side
    float scale;

    __device__ int64_t begin_of(int block) const { return works * block / gridDim.x; }
};

// Some query rows (or keys) of one batch element and head, as the loading warps tell of it.
struct PairWork {
    static constexpr int kNone = -1;  // as a batch element: nothing is left to do

    int batch, head, tile;
    bool is_first, is_last;  // of those with the same biases
    uint32_t visited, full;  // bit t: whether tile t of the other side is visited, and whether nothing of it is hidden

    PairWork() = default;
    __device__ PairWork(const PairSchedule& schedule, int64_t index, int64_t begin, int64_t end) : visited(0), full(0) {
        batch = static_cast<int>(index % schedule.batch);
        const int tiles = static_cast<int>(index / schedule.batch);
        tile = tiles % schedule.tiles;
        head = tiles / schedule.tiles;
        is_first = batch == 0 || index == begin;
        is_last = batch == schedule.batch - 1 || index == end - 1;
    }
};

// What a key mask says of a batch element's keys, a tile of kKeys a lane. All lanes of a warp call.
template <int kKeys>
struct PairKeys {
    TileSummary<kKeys> summary;
    uint32_t visited, full;

    __device__ PairKeys(const AttentionParams& p, int batch, int head) {
        const int tile = lane_id(), keys = static_cast<int>(p.seqlen_k);
        summary.full = tile * kKeys < keys;
#pragma unroll
        for (int w = 0; w < TileSummary<kKeys>::kWords; ++w) summary.columns[w] = 0;
        if (summary.full) {
            summary = MaskSummaries<64, kKeys>(p, Sequence(p, batch), head).of(0, 0, tile);
            summary.full &= (tile + 1) * kKeys <= keys;
#pragma unroll
            for (int w = 0; w < TileSummary<kKeys>::kWords; ++w)
                summary.columns[w] &= bits_below(keys - tile * kKeys, w);
        }
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < TileSummary<kKeys>::kWords; ++w) any |= summary.columns[w];
        visited = __ballot_sync(~0u, any != 0);
        full = __ballot_sync(~0u, summary.full);
    }
    // Word w of a tile's columns.
    __device__ __forceinline__ uint32_t columns(int tile, int w) const {
        return __shfl_sync(~0u, summary.columns[w], tile);
    }
};

// Rows of a tile to zeros where `hidden`: what is hidden may be NaN, and 0 times NaN would reach a sum.
template <typename Tile>
__device__ __forceinline__ void clear_row(Tile& tile, int row) {
    static_assert(Tile::kPanels == 1);
#pragma unroll
    for (int chunk = 0; chunk < Tile::kPanelChunks; ++chunk)
        *reinterpret_cast<uint4*>(tile.data + Tile::offset(row, chunk)) = {};
}

}  // namespace flash_dmattn::cuda::sm90
