// Shared memory of the backward over key lists.
#pragma once

#include "cuda/common/dkv_accum.cuh"
#include "cuda/mask/key_list.cuh"
#include "cuda/sm80/bwd/scores.cuh"
#include "bwd_tile_scheduler.cuh"

namespace flash_dmattn::cuda::sm80 {

// Pointers to key 0 of a work tile's sequence and head; for a dense bias, in the work tile's first row.
template <typename T>
struct GatherPointers {
    const T* key;
    const T* value;
    float* dkey;  // in dkv_accum
    float* dvalue;
    const char* bias = nullptr;
    float* key_dbias = nullptr;
    int64_t dense_dbias = 0;  // offset in dbias or dbias_accum

    __device__ GatherPointers(const BwdArgs& p, const Sequence& s, int head, int first_row) {
        const int kv_head = shared_head(head, p.heads, p.kv_heads);
        key = key_rows<const T>(p.key, s, kv_head);
        value = key_rows<const T>(p.value, s, kv_head);
        const DkvAccum accum(p, s, kv_head, p.dkv_cols);
        dkey = accum.dkey;
        dvalue = accum.dvalue;
        if (p.bias.kind != BiasKind::kNone) {
            const int64_t offset = score_offset(p.bias, s, head, p.heads) + first_row * p.bias.row_stride;
            bias = bias_data(p.bias, offset);
        }
        if (p.dbias.data == nullptr) return;
        const int64_t dbias = score_offset(p.dbias, s, head, p.heads);
        key_dbias = static_cast<float*>(p.dbias.data) + dbias;
        dense_dbias = dbias + first_row * p.dbias.row_stride;
    }
};

// Pipeline stage of an n_block's gathered keys.
template <int kRows, int kKeys>
struct GatheredKeyStage {
    static constexpr int kWords = kRows / 32;
    alignas(16) uint32_t rows[kWords][kKeys];  // bit i: row 32 w + i of the m_block sees the key
    alignas(16) float bias[kKeys];             // times log2(e)
    alignas(16) int position[kKeys];           // in the sequence; -1 where no row of the m_block sees the key
    uint32_t seen_by_all[kWords][kKeys / 32];  // keys that all of 32 rows see
};

template <typename Traits>
struct GatherBwdSharedStorage {
    // A step needs K of two n_blocks and V of one. With more stages, those of the next step load during it.
    static constexpr bool kPrefetchesKv = !Traits::kIsSmall && Traits::kHeadDim <= 192;
    static constexpr int kKStages = kPrefetchesKv ? 3 : 2, kVStages = kPrefetchesKv ? 2 : 1;
    static constexpr int kScoreStages = 2, kPositionStages = 4;

    QdoStage<Traits, false> qdo;
    typename Traits::KvTile key[kKStages], value[kVStages];
    typename Traits::ScoresTile probs[kScoreStages], dscores[kScoreStages];
    GatheredKeyStage<Traits::kRows, Traits::kKeys> keys[kPositionStages];
    float key_sums[kScoreStages][Traits::kSizes.score_row_warps]
                  [Traits::kKeys];  // of dx, for the gradient of a key bias
    GatherBwdWorkTile work_tile;
    KeyList list;
    GatherPointers<typename Traits::T> pointers;
};

}  // namespace flash_dmattn::cuda::sm80
