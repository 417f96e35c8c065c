// A warp group's part of a visit of the backward, to a tile of rows with a tile of keys: by neighbouring keys, and by gathered
// ones that heads share. Where it lies in the tiles, the products, and how dQ comes to its sums.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/smem_descriptor.cuh"

namespace flash_dmattn::cuda::sm90 {

// A Traits has T, sizes and shared tiles. A group multiplies 64 keys of its own with all rows; or, with kSharesKeys, all keys
// with its share of the rows, and of dK and dV makes its share of the columns. What is issued is in flight.
template <typename Traits>
class MmaAtomLayout {
    using T = typename Traits::T;
    using RowsTile = typename Traits::RowsTile;      // Q, dO
    using KeysTile = typename Traits::KeysTile;      // K, V
    using ScoresTile = typename Traits::ScoresTile;  // P, dS: rows by keys

public:
    using Pairs = float[1][Traits::kScoreRows / 8][4];  // S, dP: keys by rows
    using ScoresDescriptor = uint32_t[Traits::kScoreRows / 16][4];
    using DimSum = float[1][Traits::kSumCols / 8][4];  // dK, dV: keys by columns
    using DquerySum = float[1][Traits::kDqCols / 8][4];
    using DqueryStage = float4[Traits::kDqCols / 8][32];  // of a warp

    __device__ explicit MmaAtomLayout(int group) : warpgroup_(group) {}

    // The group's first: of the keys, of the rows of S and dP, of the columns of dK and dV; of dQ.
    __device__ int first_key() const { return Traits::kSharesKeys ? 0 : warpgroup_ * 64; }
    __device__ int first_row() const { return Traits::kSharesKeys ? warpgroup_ * Traits::kScoreRows : 0; }
    __device__ int first_col() const { return Traits::kSharesKeys ? warpgroup_ * Traits::kSumCols : 0; }
    __device__ int dquery_row() const { return Traits::kSplitsDqRows ? warpgroup_ * 64 : 0; }
    __device__ int dquery_col() const { return Traits::kSplitsDqRows ? 0 : warpgroup_ * Traits::kDqCols; }

    // S = K Q^T, or dP = V dO^T.
    __device__ __forceinline__ void issue_scores(Pairs& pairs, const KeysTile& keys, const RowsTile& rows) const {
        const SmemDescriptor<KeysTile> a(keys, first_key());
        const SmemDescriptor<RowsTile> b(rows, first_row());
        warpgroup_fence_operand(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < Traits::kHeadDim; d += 16)
            Wgmma<Traits::kScoreRows>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit_group();
    }

    // dV += P dO, or dK += dS Q: of the group's keys, or of all, in shared memory, and the group's columns.
    __device__ __forceinline__ void issue_sum(DimSum& sum, const ScoresDescriptor& pairs, const RowsTile& rows) const {
        const SmemDescriptor<RowsTile> b(rows);
        warpgroup_fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < Traits::kRows; r += 16)
            Wgmma<Traits::kSumCols>::template multiply<T, true>(sum, pairs[r / 16], b.down(r), true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void issue_sum(DimSum& sum, const ScoresTile& pairs, const RowsTile& rows) const {
        const SmemDescriptor<ScoresTile> a(pairs);
        const SmemDescriptor<RowsTile> b(rows);
        warpgroup_fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < Traits::kRows; r += 16)
            Wgmma<Traits::kSumCols>::template multiply<T, true, true>(sum, a.down(r), b.down(r, first_col()), true);
        wgmma_commit_group();
    }

    // dQ = dS^T K.
    __device__ __forceinline__ void gemm_dq(DquerySum& dquery, const ScoresTile& dscores, const KeysTile& keys) const {
        const SmemDescriptor<ScoresTile> a(dscores, dquery_row());
        const SmemDescriptor<KeysTile> b(keys);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Traits::kKeys; k += 16)
            Wgmma<Traits::kDqCols>::template multiply<T, false, true>(dquery, a.across(k), b.down(k, dquery_col()),
                                                                      k > 0);
        wgmma_commit_group();
    }

    // This warp's dQ to its sums, as registers hold it: from shared memory by the copy engine, so that what threads read next
    // does not queue behind additions.
    __device__ __forceinline__ void add_staged(const DquerySum& dquery, DqueryStage& stage, float* to) const {
        const int lane = lane_id();
        if (lane == 0) tma_store_wait_group_read();  // of the visit before
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Traits::kDqCols / 8; ++n) {
            const float* x = dquery[0][n];
            stage[n][lane] = {x[0], x[1], x[2], x[3]};
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            tma_reduce_add(to, smem_address(&stage), sizeof(stage));
            tma_store_commit_group();
        }
    }

private:
    int warpgroup_;
};

}  // namespace flash_dmattn::cuda::sm90
