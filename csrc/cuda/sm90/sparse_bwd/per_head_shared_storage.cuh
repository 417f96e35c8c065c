// Shared memory of the per-head sparse backward, and its work tile.
//
// A CTA owns an m_block of one query head. Its mainloop iterates over the key list of the m_block: the producer
// warpgroup gathers an n_block of K and V, two MMA warpgroups have 64 of its keys each and compute S and dP transposed
// (keys x rows). dK and dV of each n_block are added to float32 sums in global memory. dQ stays in registers, 64 rows
// in each warpgroup.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "params.h"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/arch/pipeline.cuh"
#include "cuda/common/packed_blocks.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// An m_block of one query head. Heads that add to the same keys are neighbours. The last rows come first: under
// causality their lists are the longest.
struct PerHeadSparseBwdWorkTile {
    Sequence s;
    int head, first_row;

    __device__ PerHeadSparseBwdWorkTile(const BwdArgs& p, unsigned work_index, int m_block_rows) : s(p, 0) {
        FlatIndex index(work_index);
        const int kv_heads = static_cast<int>(p.kv_heads), qheads_per_kv = static_cast<int>(p.heads) / kv_heads;
        const int num_m_blocks = static_cast<int>(count_m_blocks(p, m_block_rows));
        head = index.pop(qheads_per_kv);
        const int m_block = num_m_blocks - 1 - index.pop(num_m_blocks);
        head += index.pop(kv_heads) * qheads_per_kv;
        const NumberedMBlock block(p, packs_m_blocks(p, m_block_rows), m_block, static_cast<int>(index.rest),
                                   m_block_rows);
        s = Sequence(p, block.batch);
        first_row = block.first_row;
    }
    __device__ bool is_empty() const { return first_row >= s.rows; }
};

template <typename Traits>
struct PerHeadSparseBwdSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kRowWords = kRows / 32;

    alignas(kSmemTileAlign) typename Traits::RowsTile query;
    alignas(kSmemTileAlign) typename Traits::RowsTile dout;
    alignas(kSmemTileAlign) typename Traits::KvTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::KvTile value[Traits::kValueStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile dscores;
    typename Traits::DkvStages dkv[Traits::kConsumerWarpgroups * 4];  // per warp
    GatheredKeyMetadata<kKeys> keys[Traits::kKeyStages];
    alignas(16) float lse[kRows];  // times log2(e); inf where a row sees no key or lies beyond the sequence
    alignas(16) float delta[kRows];
    bool has_empty_rows[kRowWords];  // for 32 rows each: some have an lse of inf
    // Aligned, so that no load of 16 bytes also covers has_empty_rows, which another warp may write meanwhile.
    alignas(16) Uninitialized<PerHeadSparseBwdWorkTile> raw_work_tile;
    Uninitialized<KeyList> raw_list;
    int num_n_blocks;
    alignas(8) uint64_t rows_full;
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kValueStages> value_pipeline;

    __device__ PerHeadSparseBwdWorkTile& work_tile() { return raw_work_tile.get(); }
    __device__ KeyList& list() { return raw_list.get(); }

    // One thread calls.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        mbarrier_init(smem_address(&rows_full), kWarpgroupThreads);
        // Each producer thread arrives twice: for its key's data, and when its copies are complete.
        key_pipeline.init(2 * kWarpgroupThreads, kConsumerWarps);
        value_pipeline.init(kWarpgroupThreads, kConsumerWarps);
    }
};

}  // namespace flash_dmattn::cuda::sm90
