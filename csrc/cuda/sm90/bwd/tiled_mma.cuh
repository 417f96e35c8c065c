// One MMA warpgroup's share of a step of the backward's mainloop, an (m_block, n_block) of the dense or the grouped
// sparse kernel: its operands, its GEMMs, and the reduction of dQ in global memory.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/gemm.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/smem_descriptor.cuh"

namespace flash_dmattn::cuda::sm90 {

// Traits: a BwdMmaTraits, which defines how the warpgroups split each GEMM. A GEMM returns while its wgmma group is in
// flight.
template <typename Traits>
class BwdTiledMma {
    using T = typename Traits::T;
    using RowsTile = typename Traits::RowsTile;      // Q, dO: rows x head_dim
    using KvTile = typename Traits::KvTile;          // K, V: keys x head_dim
    using ScoresTile = typename Traits::ScoresTile;  // P, dS: rows x keys

public:
    using ScoresFragment = float[1][Traits::kScoreRows / 8][4];  // S, dP: keys x rows
    using ScoresOperand = uint32_t[Traits::kScoreRows / 16][4];  // P, dS in 16 bits
    using DkvFragment = float[1][Traits::kDkvCols / 8][4];       // dK, dV: keys x columns
    using DqFragment = float[1][Traits::kDqN / 8][4];            // rows x columns, or columns x rows
    using DqStage = float4[Traits::kDqN / 8][32];                // of one warp, in shared memory

    __device__ explicit BwdTiledMma(int warpgroup) : warpgroup_(warpgroup) {}

    // The warp's first key of the n_block: a warp holds 16 keys of S, dP, dK and dV.
    static __device__ int warp_key() { return (Traits::kSharesKeys ? warp_id() % 4 : warp_id() - 4) * 16; }
    // The warpgroup's origin: keys and rows of S and dP; columns of dK and dV; rows and columns of dQ.
    __device__ int first_key() const { return Traits::kSharesKeys ? 0 : warpgroup_ * 64; }
    __device__ int first_row() const { return Traits::kSharesKeys ? warpgroup_ * Traits::kScoreRows : 0; }
    __device__ int first_col() const { return Traits::kSharesKeys ? warpgroup_ * Traits::kDkvCols : 0; }
    __device__ int dq_row() const { return Traits::kSplitsDqRows ? warpgroup_ * 64 : 0; }
    __device__ int dq_col() const { return Traits::kSplitsDqRows ? 0 : warpgroup_ * Traits::kDqCols; }

    // S = K Q^T or dP = V dO^T, summed over head_dim: both operands are K-major. Without kZeroInit S += K Q^T.
    template <bool kZeroInit = true>
    __device__ __forceinline__ void gemm_scores(ScoresFragment& scores, const KvTile& keys,
                                                const RowsTile& rows) const {
        const SmemDescriptor<KvTile> a(keys, first_key());
        const SmemDescriptor<RowsTile> b(rows, first_row());
        gemm_ss<kZeroInit, Major::kK, Major::kK>(scores, a, b);
    }
    // dV += P dO or dK += dS Q, summed over rows: dO and Q are MN-major. P and dS of the warpgroup's own keys are in
    // registers, those of shared keys in shared memory, MN-major.
    __device__ __forceinline__ void gemm_dkv(DkvFragment& acc, const ScoresOperand& scores,
                                             const RowsTile& rows) const {
        gemm_rs<false, Major::kMN>(acc, scores, SmemDescriptor<RowsTile>(rows));
    }
    __device__ __forceinline__ void gemm_dkv(DkvFragment& acc, const ScoresTile& scores, const RowsTile& rows) const {
        const SmemDescriptor<ScoresTile> a(scores);
        const SmemDescriptor<RowsTile> b(rows, 0, first_col());
        gemm_ss<false, Major::kMN, Major::kMN>(acc, a, b);
    }
    // dQ = dS^T K or dQ^T = K^T dS, summed over keys: dS is K-major, K is MN-major.
    __device__ __forceinline__ void gemm_dq(DqFragment& dq, const ScoresTile& dscores, const KvTile& keys) const {
        const SmemDescriptor<ScoresTile> rows(dscores, dq_row());
        const SmemDescriptor<KvTile> cols(keys, 0, dq_col());
        if constexpr (Traits::kTransposesDq) {
            gemm_ss<true, Major::kMN, Major::kK>(dq, cols, rows);
        } else {
            gemm_ss<true, Major::kK, Major::kMN>(dq, rows, cols);
        }
    }

    // Adds the warp's dQ to `to` in accumulator order, by TMA from shared memory: additions from registers would delay
    // the warp's next loads.
    __device__ __forceinline__ void tma_reduce_add_dq(const DqFragment& dq, DqStage& stage, float* to) const {
        const bool is_elected = elect_one_sync();
        stage_dq(dq, stage, is_elected);
        tma_reduce_add_staged_dq(stage, to, is_elected);
    }
    // The same in two parts.
    __device__ __forceinline__ void stage_dq(const DqFragment& dq, DqStage& stage, bool is_elected) const {
        if (is_elected) tma_store_wait_group_read();  // of the previous step
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Traits::kDqN / 8; ++n) {
            const float* x = dq[0][n];
            stage[n][lane_id()] = {x[0], x[1], x[2], x[3]};
        }
    }
    __device__ __forceinline__ void tma_reduce_add_staged_dq(const DqStage& stage, float* to, bool is_elected) const {
        fence_proxy_async();
        __syncwarp();
        if (is_elected) {
            tma_reduce_add(to, smem_address(&stage), sizeof(stage));
            tma_store_commit_group();
        }
    }

private:
    int warpgroup_;
};

}  // namespace flash_dmattn::cuda::sm90
