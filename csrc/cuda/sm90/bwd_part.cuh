// A warp group's part of a visit of the backward, to a tile of rows with a tile of keys: by neighbouring keys, and by gathered
// ones that heads share. Where it lies in the tiles, the products, and how dQ comes to its sums.
#pragma once

#include "../ptx/sm90.cuh"
#include "operand.cuh"

namespace flash_dmattn::cuda::sm90 {

// A Tile has T, sizes and shared tiles. A group multiplies 64 keys of its own with all rows; or, with kSharesKeys, all keys
// with its share of the rows, and of dK and dV makes its share of the columns. What is issued is in flight.
template <typename Tile>
class BwdPart {
    using T = typename Tile::T;
    using RowsTile = typename Tile::RowsTile;    // Q, dO
    using KeysTile = typename Tile::KeysTile;    // K, V
    using PairsTile = typename Tile::PairsTile;  // P, dS: rows by keys

public:
    using Pairs = float[1][Tile::kScoreRows / 8][4];  // S, dP: keys by rows
    using PairsOperand = uint32_t[Tile::kScoreRows / 16][4];
    using DimSum = float[1][Tile::kSumCols / 8][4];  // dK, dV: keys by columns
    using DquerySum = float[1][Tile::kDqCols / 8][4];
    using DqueryStage = float4[Tile::kDqCols / 8][32];  // of a warp

    __device__ explicit BwdPart(int group) : group_(group) {}

    // The group's first: of the keys, of the rows of S and dP, of the columns of dK and dV; of dQ.
    __device__ int first_key() const { return Tile::kSharesKeys ? 0 : group_ * 64; }
    __device__ int first_row() const { return Tile::kSharesKeys ? group_ * Tile::kScoreRows : 0; }
    __device__ int first_col() const { return Tile::kSharesKeys ? group_ * Tile::kSumCols : 0; }
    __device__ int dquery_row() const { return Tile::kSplitsDqRows ? group_ * 64 : 0; }
    __device__ int dquery_col() const { return Tile::kSplitsDqRows ? 0 : group_ * Tile::kDqCols; }

    // S = K Q^T, or dP = V dO^T.
    __device__ __forceinline__ void issue_scores(Pairs& pairs, const KeysTile& keys, const RowsTile& rows) const {
        const Operand<KeysTile> a(keys, first_key());
        const Operand<RowsTile> b(rows, first_row());
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < Tile::kHeadDim; d += 16)
            Wgmma<Tile::kScoreRows>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit();
    }

    // dV += P dO, or dK += dS Q: of the group's keys, or of all, in shared memory, and the group's columns.
    __device__ __forceinline__ void issue_sum(DimSum& sum, const PairsOperand& pairs, const RowsTile& rows) const {
        const Operand<RowsTile> b(rows);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < Tile::kRows; r += 16)
            Wgmma<Tile::kSumCols>::template multiply<T, true>(sum, pairs[r / 16], b.down(r), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_sum(DimSum& sum, const PairsTile& pairs, const RowsTile& rows) const {
        const Operand<PairsTile> a(pairs);
        const Operand<RowsTile> b(rows);
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < Tile::kRows; r += 16)
            Wgmma<Tile::kSumCols>::template multiply<T, true, true>(sum, a.down(r), b.down(r, first_col()), true);
        wgmma_commit();
    }

    // dQ = dS^T K.
    __device__ __forceinline__ void issue_dquery(DquerySum& dquery, const PairsTile& dscores, const KeysTile& keys) const {
        const Operand<PairsTile> a(dscores, dquery_row());
        const Operand<KeysTile> b(keys);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Tile::kKeys; k += 16)
            Wgmma<Tile::kDqCols>::template multiply<T, false, true>(dquery, a.across(k), b.down(k, dquery_col()), k > 0);
        wgmma_commit();
    }

    // This warp's dQ to its sums, as registers hold it: from shared memory by the copy engine, so that what threads read next
    // does not queue behind additions.
    __device__ __forceinline__ void add_staged(const DquerySum& dquery, DqueryStage& stage, float* to) const {
        const int lane = lane_id();
        if (lane == 0) store_box_wait_read();  // of the visit before
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Tile::kDqCols / 8; ++n) {
            const float* x = dquery[0][n];
            stage[n][lane] = {x[0], x[1], x[2], x[3]};
        }
        fence_async();
        __syncwarp();
        if (lane == 0) {
            reduce_add_bulk(to, smem_address(&stage), sizeof(stage));
            store_box_commit();
        }
    }

private:
    int group_;
};

}  // namespace flash_dmattn::cuda::sm90
