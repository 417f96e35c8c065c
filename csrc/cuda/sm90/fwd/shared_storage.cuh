// A block of the forward for compute capability 9.0: what its warp groups share.
//
// The first group loads, the others multiply, 64 query rows each. The loading group decides what there is to do: works
// (tiles of query rows) and, of each work, tiles of keys, which it hands over in pipelines of shared memory.
#pragma once

#include <cuda.h>

#include "params.h"
#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"
#include "kernel_traits.h"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/arch/pipeline.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // that a warp group multiplies

// The threads that hand over keys; of a dense bias the last warp of their group hands over the bias.
template <BiasKind kBias>
constexpr int kProducerThreads = kBias == BiasKind::kDense ? 96 : 128;

// How the work is cut among blocks.
struct FwdSchedule {
    unsigned num_work_tiles;
    FastDivmod num_m_blocks;  // of a head
    FastDivmod heads;         // H / tile_heads
    FastDivmod batch;
    uint32_t*
        tile_count_semaphore;  // counts the works that blocks have drawn; null, and unasked with a dense bias: nobody draws
    int tile_heads;  // of gathered keys: 1, or as many as there are groups, which then have the same rows of one head each
    bool batch_first;   // neighbouring works differ in their batch, else in their row tile
    bool m_block_last;  // all heads come before the next row tile: works that follow each other are about as long
    float scale;
    float to_log2;  // makes exponents of 2 of what the softmax sees
    // Scores stay unscaled where nothing is added to them and their order is that of the scaled ones.
    bool raw_scores;
    float softcap;
};

// How the copy engine finds the tensors: [D, heads, S, B], of a dense bias [Sk, Sq, heads, B].
struct FwdMaps {
    CUtensorMap query, key, value, bias;
};

// Some query rows of one head.
struct FwdWorkTile {
    static constexpr int kNone = -1;  // as a head: nothing is left to do

    Sequence s;
    int head;
    int first_row;
    int listed = 0;  // of gathered keys: the length of the list

    __device__ FwdWorkTile(const FwdArgs& p, const FwdSchedule& schedule, unsigned number, int rows) {
        FlatIndex index(number);
        int batch = schedule.batch_first ? index.take(schedule.batch) : 0;
        int tile = schedule.m_block_last ? 0 : index.take(schedule.num_m_blocks);
        head = index.take(schedule.heads);
        if (!schedule.batch_first) batch = index.take(schedule.batch);
        if (schedule.m_block_last) tile = static_cast<int>(index.rest);
        // The last rows come first: under causality they are the longest.
        first_row = (static_cast<int>(schedule.num_m_blocks.value) - 1 - tile) * rows;
        s = Sequence(p, batch);
    }
    __device__ bool empty() const { return first_row >= s.rows; }
};

template <typename T, BiasKind kBias, typename Traits>
struct FwdSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = kKeys / 32;
    static constexpr int kBiasKeys = 64;  // of a tile of dense biases
    static constexpr int kWorkTileStages = Traits::kQueryStages + 1;
    static constexpr int kNextWorkTileBarrier =
        1 + 2 * Traits::kConsumerWarpgroups;  // behind those of the groups that multiply

    using QueryTile = SmemTile<T, kRows, Traits::kHeadDim>;
    using KeyTile = SmemTile<T, kKeys, Traits::kHeadDim>;
    using BiasTile = SmemTile<T, kWarpgroupRows, kBiasKeys>;
    struct NoBias {};
    using MaskWords = std::conditional_t<kWords == 4, uint4, uint2>;  // of a row

    // What comes with a tile of keys.
    struct KeyInfo {
        static constexpr int kNone = -1;  // as a tile: the work visits none

        int tile;                              // not of gathered keys
        bool full;                             // neither mask nor causality nor lengths hide a pair
        bool last;                             // the work visits no other; not of gathered keys
        alignas(16) uint32_t columns[kWords];  // keys that some row sees; those that a key bias hides are none
        // Of masks that rows do not share, where the tile is not full: the keys that a row sees; of gathered keys the rows
        // that see a key.
        alignas(16) std::conditional_t<Traits::kGathers, uint32_t[kRows / 32][kKeys], uint32_t[kRows][kWords]> mask;
        std::conditional_t<kBias == BiasKind::kKey, float[kKeys], NoBias> bias;
    };

    alignas(kSmemTileAlign) QueryTile query[Traits::kQueryStages];
    alignas(kSmemTileAlign) KeyTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) KeyTile value[Traits::kValueStages];
    using BiasTiles = std::conditional_t<kBias == BiasKind::kDense,
                                         BiasTile[Traits::kConsumerWarpgroups][Traits::kBiasStages], NoBias>;
    alignas(kSmemTileAlign) BiasTiles bias;
    KeyInfo keys[Traits::kKeyStages];
    alignas(FwdWorkTile) unsigned char num_work_tiles[kWorkTileStages]
                                                     [sizeof(FwdWorkTile)];  // those of the queries, and the one before
    unsigned next_work_tile[2];                                              // as drawn, in turn
    PipelineBarriers<Traits::kQueryStages> query_pipeline;
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kValueStages> value_pipeline;
    PipelineBarriers<Traits::kBiasStages> bias_pipelines[Traits::kConsumerWarpgroups];

    __device__ FwdWorkTile& work_tile(int turn) { return reinterpret_cast<FwdWorkTile&>(num_work_tiles[turn]); }

    // By one thread.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        query_pipeline.init(1, kConsumerWarps);
        // A thread that gathers arrives twice: with what comes with the keys, and when these have been copied.
        key_pipeline.init(Traits::kGathers ? 2 * kWarpgroupThreads : kProducerThreads<kBias>, kConsumerWarps);
        value_pipeline.init(Traits::kGathers ? kWarpgroupThreads : 1, kConsumerWarps);
        for (auto& pipeline : bias_pipelines) pipeline.init(1, 4);
    }
};

// Whether a mask says of each row other things; else the columns of its tiles say all.
__device__ __forceinline__ bool mask_differs_by_row(const AttentionParams& p) {
    return p.interval_summaries.tiles != nullptr ||
           (p.packed_mask.bits != nullptr && p.packed_mask.bits_row_stride != 0);
}

}  // namespace flash_dmattn::cuda::sm90
