// The backward's main kernel: shared memory of a CTA, and the n_block that it owns.
#pragma once

#include "dsmem_reduction.cuh"
#include "scores.cuh"
#include "m_block_iterator.cuh"

namespace flash_dmattn::cuda::sm80 {

// ldmatrix offsets of each thread's fragments, computed once and kept in shared memory: recomputing them costs a tenth
// of the instructions, and the mainloop has no registers left. A, B, C are the operands of S = Q K^T and dP = dO V^T
// ("Score"), dV = P^T dO and dK = dS^T Q ("Dkv"), dQ = dS K ("Dq").
enum LdmatrixOffset {
    kScoreA,  // Q, dO
    kScoreB,  // K, V
    kScoreC,  // bias, P, dS
    kDkvA,    // P^T, dS^T
    kDkvB,    // dO, Q
    kDqA,     // dS
    kDqB,     // K
    kLdmatrixOffsets
};

template <typename Traits, BiasKind kBias>
struct BwdSharedStorage {
    static constexpr bool kKeyBias = kBias == BiasKind::kKey;
    // P overwrites the dense bias, so the next bias tile needs a stage of its own.
    static constexpr int kProbStages = kBias == BiasKind::kDense ? 2 : 1;
    typename Traits::KvTile key;
    typename Traits::KvTile value;
    QdoStage<Traits, kKeyBias> qdo[2];
    typename Traits::ScoresTile probs[kProbStages];
    typename Traits::ScoresTile dscores;
    uint16_t ldmatrix_offsets[kLdmatrixOffsets][Traits::kThreads];  // in bytes
    // One per warp, so that warps need no barrier:
    HeadPointers<typename Traits::T> head_pointers[Traits::kThreads / 32];
    BiasPointer<typename Traits::T> bias_pointers[Traits::kThreads / 32];
    MBlockIteratorState m_block_states[Traits::kThreads / 32];
    float key_sums[Traits::kKeys];
    Sequence sequence;
    int bias_batch;  // batch index of the bias; with variable length the sequence
    int rank;        // of the sequence among the batch elements that share a bias
    int work_index;  // deterministic: of the work tile
};

// Whether the DSMEM reduction fits beside the rest into 227 KiB, the limit of compute capability 9.0.
template <typename Traits>
constexpr bool kCanClusterReduce =
    !Traits::kIsSmall &&
    sizeof(BwdSharedStorage<Traits, BiasKind::kDense>) + sizeof(DsmemReductionSharedStorage<Traits>) <= 227 * 1024;

// Holds scalars only: with an array member the whole struct would stay in local memory.
template <typename Traits, BiasKind kBias>
struct BwdCta {
    using SharedStorage = BwdSharedStorage<Traits, kBias>;

    const BwdArgs& p;
    SharedStorage& smem;
    const SmemAddress address_of;
    const int n_block, first_key, kv_head;
    const int qheads_per_kv, first_head;  // of kv_head's GQA group
    const int score_row, score_key;       // this warp's first row and key of S and dP

    // smem.sequence has been written.
    __device__ BwdCta(const BwdArgs& args, SharedStorage& memory, int qheads_per_kv_, int n_block_, int kv_head_)
        : p(args), smem(memory), address_of(&memory), n_block(n_block_), first_key(n_block_ * Traits::kKeys),
          kv_head(kv_head_), qheads_per_kv(qheads_per_kv_), first_head(kv_head_ * qheads_per_kv),
          score_row(warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows),
          score_key(warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys) {}

    // Stays in shared memory: every pointer that the compiler derives from it would cost the mainloop two registers.
    __device__ const Sequence& sequence() const { return smem.sequence; }
    __device__ int rows_left(int m_block) const { return sequence().rows - m_block * Traits::kRows; }
    __device__ int keys_left() const { return sequence().keys - first_key; }

    __device__ MBlockIterator<Traits> m_block_iterator() const {
        return {smem.m_block_states[warp_id()], p, sequence(), n_block, first_head};
    }
};

}  // namespace flash_dmattn::cuda::sm80
