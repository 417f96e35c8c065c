// A block of the backward's main kernel: its shared memory, the keys that it owns, and where its warps' parts of the
// products lie.
#pragma once

#include "dsmem_reduction.cuh"
#include "scores.cuh"
#include "m_block_iterator.cuh"

namespace flash_dmattn::cuda::sm80 {

// The corners from which a thread reads or writes the tiles of the products. They are found once and kept in shared
// memory: found anew, they would cost a tenth of the instructions, and registers are short.
enum LaneOffset {
    kScoreRows,   // of Q and dO, for S and dP
    kScoreKeys,   // of K and V
    kScorePairs,  // of the bias, P and dS, where S and dP become P and dS
    kDkvPairs,    // of P and dS, for dK and dV
    kDkvRows,     // of Q and dO
    kDqPairs,     // of dS, for dQ
    kDqKeys,      // of K
    kLaneOffsets
};

template <typename Traits, BiasKind kBias>
struct BwdSharedStorage {
    static constexpr bool kKeyBias = kBias == BiasKind::kKey;
    // A dense bias lies where P will be written, so its next tile needs a place of its own.
    static constexpr int kProbStages = kBias == BiasKind::kDense ? 2 : 1;
    typename Traits::KeysTile key;
    typename Traits::KeysTile value;
    RowStage<Traits, kKeyBias> rows[2];
    typename Traits::ScoresTile probs[kProbStages];
    typename Traits::ScoresTile dscores;
    uint16_t lane_offsets[kLaneOffsets][Traits::kThreads];  // of each thread's part of the products, in bytes
    // Each warp's own: no warp waits for another to find them.
    HeadRows<typename Traits::T> head_rows[Traits::kThreads / 32];
    HeadBias<typename Traits::T> head_bias[Traits::kThreads / 32];
    RowTilePlace places[Traits::kThreads / 32];
    float column_sums[Traits::kKeys];
    Sequence sequence;
    int bias_batch;  // that the sequence goes by; of variable length its own
    int rank;        // of the sequence among those that share a bias
    int ticket;
};

// Whether a block's shared memory holds what it exchanges, too: 227 KiB on compute capability 9.0.
template <typename Traits>
constexpr bool kCanClusterReduce =
    !Traits::kIsSmall &&
    sizeof(BwdSharedStorage<Traits, BiasKind::kDense>) + sizeof(DxExchangeSharedStorage<Traits>) <= 227 * 1024;

// A visit to a tile of query rows.
struct RowTileVisit {
    int stage;  // which of the two that take turns: 0 at the first visit, then 1, and so on
    int head, m_block;
    bool mask_full;  // the mask hides nothing of the tile
};

// Scalars alone: an array among them would keep all of them in local memory for as long as the compiler does not know
// which element is meant, and what it makes of them until then would spill.
template <typename Traits, BiasKind kBias>
struct BwdBlock {
    using SharedStorage = BwdSharedStorage<Traits, kBias>;

    const BwdArgs& p;
    SharedStorage& smem;
    const SmemAddress address_of;
    const int n_block, first_key, kv_head;
    const int group, first_head;     // the query heads of kv_head
    const int score_row, score_key;  // where this warp's part of S and dP begins

    // smem.sequence has been written.
    __device__ BwdBlock(const BwdArgs& args, SharedStorage& memory, int group_, int n_block_, int kv_head_)
        : p(args),
          smem(memory),
          address_of(&memory),
          n_block(n_block_),
          first_key(n_block_ * Traits::kKeys),
          kv_head(kv_head_),
          group(group_),
          first_head(kv_head_ * group),
          score_row(warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows),
          score_key(warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys) {}

    // In shared memory, where the compiler leaves it: of what it would compute from it once and for all, each pointer
    // would cost the main loop two registers.
    __device__ const Sequence& sequence() const { return smem.sequence; }
    __device__ int rows_from(int m_block) const { return sequence().rows - m_block * Traits::kRows; }
    __device__ int keys() const { return sequence().keys - first_key; }

    template <bool kCausal>
    __device__ RowTileCursor<Traits, kCausal> cursor() const {
        return {smem.places[warp_id()], p, sequence(), n_block, first_head};
    }
};

}  // namespace flash_dmattn::cuda::sm80
