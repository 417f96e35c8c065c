// A block of the backward over key lists for compute capability 9.0: what its warp groups share.
//
// It owns a tile of query rows of one head and goes over the list of keys that they see. The first warp group gathers the
// keys, the others multiply, 64 keys each of a tile. Scores stand transposed, keys by rows: so P and dS are operands of
// dV = P dO and dK = dS Q as they lie in registers. What the tile adds to a key's dK and dV is summed in global memory;
// dQ stays in registers, 64 rows in each group.
#pragma once

#include <cuda.h>

#include "cuda/arch/mbarrier.cuh"
#include "params.h"
#include "cuda/plan.h"
#include "key_fragment.cuh"
#include "cuda/arch/smem_descriptor.cuh"
#include "cuda/arch/pipeline.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T_, int kHeadDim_>
struct PerHeadSparseBwdKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRows = KeyListsView::kRows, kKeys = 128;
    static constexpr int kConsumerWarpgroups = 2;  // warp groups that multiply
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kKeyStages = kHeadDim > 64 ? 1 : 2, kValueStages = kKeyStages;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    static_assert(kRows == 64 * kConsumerWarpgroups && kKeys == 64 * kConsumerWarpgroups &&
                  kKeys % KeyListsView::kAlign == 0);

    using RowsTile = SmemTile<T, kRows, kHeadDim>;  // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim>;  // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;   // dS
    using SumsStages = KeyGradientStages<64, 3>;
};

// How the copy engine finds the rows: [D, heads, S, B].
struct SparseBwdMaps {
    CUtensorMap query, dout;
};

// The rows that a block owns. Blocks that add to the same keys are neighbours; the last rows come first: under causality
// their lists are the longest.
struct PerHeadSparseBwdWorkTile {
    Sequence s;
    int head, first_row;

    __device__ PerHeadSparseBwdWorkTile(const BwdArgs& p, unsigned number, int tile_rows) : s(p, 0) {
        FlatIndex index(number);
        const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.heads) / kv_heads;
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), tile_rows);
        head = index.take(group);
        first_row = (num_m_blocks - 1 - index.take(num_m_blocks)) * tile_rows;
        head += index.take(kv_heads) * group;
        s = Sequence(p, static_cast<int>(index.rest));
    }
    __device__ bool empty() const { return first_row >= s.rows; }
};

template <typename Traits>
struct GatherBwdSharedStorage {
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kRowWords = kRows / 32;

    alignas(kSmemTileAlign) typename Traits::RowsTile query;
    alignas(kSmemTileAlign) typename Traits::RowsTile dout;
    alignas(kSmemTileAlign) typename Traits::KeysTile key[Traits::kKeyStages];
    alignas(kSmemTileAlign) typename Traits::KeysTile value[Traits::kValueStages];
    alignas(kSmemTileAlign) typename Traits::ScoresTile dscores;
    typename Traits::SumsStages sums[Traits::kConsumerWarpgroups * 4];  // of a warp
    GatheredKeys<kKeys> keys[Traits::kKeyStages];
    alignas(16) float lse[kRows];  // times log2(e); inf where a row sees nothing, or lies beyond the sequence
    alignas(16) float delta[kRows];
    bool has_empty[kRowWords];  // of 32 rows: some have an lse of inf
    alignas(PerHeadSparseBwdWorkTile) unsigned char raw_work_tile[sizeof(PerHeadSparseBwdWorkTile)];
    alignas(KeyList) unsigned char raw_list[sizeof(KeyList)];
    int tiles;  // of keys
    alignas(8) uint64_t rows_full;
    PipelineBarriers<Traits::kKeyStages> key_pipeline;
    PipelineBarriers<Traits::kValueStages> value_pipeline;

    __device__ PerHeadSparseBwdWorkTile& work_tile() {
        return reinterpret_cast<PerHeadSparseBwdWorkTile&>(raw_work_tile);
    }
    __device__ KeyList& list() { return reinterpret_cast<KeyList&>(raw_list); }

    // By one thread.
    __device__ void init_pipelines() {
        constexpr int kConsumerWarps = Traits::kConsumerWarpgroups * 4;
        mbarrier_init(smem_address(&rows_full), 128);
        // A thread that gathers arrives twice: with what comes with the keys, and when these have been copied.
        key_pipeline.init(2 * 128, kConsumerWarps);
        value_pipeline.init(128, kConsumerWarps);
    }
};

}  // namespace flash_dmattn::cuda::sm90
