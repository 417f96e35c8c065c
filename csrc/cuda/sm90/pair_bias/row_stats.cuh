// lse and D_i of query rows, for the pair bias backward.
#pragma once

#include "cuda/softmax/scores.cuh"
#include "bias_block.cuh"
#include "work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

// TMA descriptors: rows as [D, heads, S, B], the bias as [Sk, Sq, heads, 1].
struct PairBiasBwdTensorMaps {
    CUtensorMap query, out, dout, key, value, bias;
};

// Row stats of an m_block in shared memory.
struct PairBiasSmemRowStats {
    // {lse, lse, D_i, D_i} of two consecutive rows. lse is times log2(e), and inf for rows without a visible key.
    float4 row_pairs[kPairBiasRows / 2];

    __device__ __forceinline__ float& lse(int row) {
        return reinterpret_cast<float*>(row_pairs)[row / 2 * 4 + row % 2];
    }
    __device__ __forceinline__ float& delta(int row) { return (&lse(row))[2]; }
};

// Row stats of an m_block in a warp's registers, rows 2 lane_id() + {0, 1}: prefetched before their stage is filled.
struct PairBiasRowStats {
    float lse[2], delta[2];

    // delta_view: D_i or a term of it; null: 0.
    __device__ PairBiasRowStats(const BwdArgs& p, const RowStatView& delta_view, const Sequence& s, int head,
                                int first_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + 2 * lane_id() + i;
            const bool exists = row < s.rows;
            const auto stat = [&](const RowStatView& view) {
                return exists ? static_cast<const float*>(view.data)[stat_offset(view, s, head) + row] : 0.f;
            };
            lse[i] = increased_lse_to_log2(stat(p.lse), exists);
            delta[i] = lse[i] == kInfinity || delta_view.data == nullptr ? 0.f : stat(delta_view);
        }
    }
    // Zeros rows without a visible key and rows beyond the sequence: they may be NaN.
    template <typename... Tiles>
    __device__ __forceinline__ void zero_empty_rows(Tiles&... tiles) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lse[i] == kInfinity) (zero_row(tiles, 2 * lane_id() + i), ...);
    }
};

}  // namespace flash_dmattn::cuda::sm90
