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

// A block goes over some of the batch elements that share a bias, with one tile of one head's rows (or keys).
struct PairSchedule {
    int tiles;  // of a head
    int sharers;  // of one bias
    int splits;   // parts that they are cut into
    int bias_tiles;  // of 64 keys (or rows), of the whole other side
    float scale;
};

struct PairBlock {
    int tile, head, bias_batch, split;
    int begin, end;  // of the batch elements

    __device__ PairBlock(const PairSchedule& schedule, int heads, int biases) {
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
struct PairVisits {
    uint32_t visited, full;
};

// What a key mask says of a batch element's keys, a tile of kKeys a lane. All lanes of a warp call.
template <int kKeys>
struct PairKeys {
    TileSummary<kKeys> summary;
    PairVisits visits;

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
        visits.visited = __ballot_sync(~0u, any != 0);
        visits.full = __ballot_sync(~0u, summary.full);
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

// Which of kKeys keys a mask hides, for the lanes that hold them: word [c][n] is of the keys 8 n + 2 c and the next, all ones
// in the half of one that is hidden.
template <int kKeys>
struct PairHiddenKeys {
    static constexpr int kTiles = kKeys / 8;  // of an accumulator

    alignas(16) uint32_t words[4][kTiles];

    // One warp; columns: bit j % 32 of word j / 32 is whether key j is visible.
    __device__ __forceinline__ void set(const uint32_t (&columns)[kKeys / 32]) {
#pragma unroll
        for (int w = 0; w < kKeys / 32; ++w) {
            if (lane_id() >= 16) continue;
            const int c = lane_id() / 4, n = lane_id() % 4;
            const uint32_t visible = columns[w] >> (n * 8 + c * 2);
            words[c][w * 4 + n] = (visible & 1 ? 0 : 0x0000ffffu) | (visible & 2 ? 0 : 0xffff0000u);
        }
    }
    // Of this lane's keys of 16, from tile n of the accumulator on: biases, as load_a gives them, to -inf.
    template <typename T>
    static __device__ __forceinline__ void hide(uint32_t (&bias)[4], const uint32_t (&lane)[kTiles], int n) {
        constexpr uint32_t kHiding = std::is_same_v<T, half_t> ? 0xfc00fc00u : 0xff80ff80u;
#pragma unroll
        for (int i = 0; i < 4; ++i) bias[i] = (bias[i] & ~lane[n + i / 2]) | (kHiding & lane[n + i / 2]);
    }
    __device__ __forceinline__ void load(uint32_t (&lane)[kTiles]) const {
#pragma unroll
        for (int n = 0; n < kTiles; n += 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(&words[lane_id() % 4][n]);
            lane[n] = x.x, lane[n + 1] = x.y, lane[n + 2] = x.z, lane[n + 3] = x.w;
        }
    }
};

// |row|^2, or somewhat more.
template <typename T, typename Tile>
__device__ __forceinline__ float row_norm2(const Tile& tile, int row) {
    constexpr float kRoundings = 1.1f;  // of sums of 16 bits
    using Pair = std::conditional_t<std::is_same_v<T, half_t>, __half2, __nv_bfloat162>;
    Pair sum = {};
#pragma unroll
    for (int chunk = 0; chunk < Tile::kPanelChunks; ++chunk) {
        const uint4 words = *reinterpret_cast<const uint4*>(tile.data + Tile::offset(row, chunk));
        const auto* pairs = reinterpret_cast<const Pair*>(&words);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = __hfma2(pairs[i], pairs[i], sum);
    }
    const float2 halves = unpack<T>(reinterpret_cast<const uint32_t&>(sum));
    return (halves.x + halves.y) * kRoundings;
}

}  // namespace flash_dmattn::cuda::sm90
