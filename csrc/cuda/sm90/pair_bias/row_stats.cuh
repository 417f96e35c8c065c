// What the backward is told of query rows: lse and D_i, where a dense bias is shared by batch elements.
#pragma once

#include "cuda/softmax/scores.cuh"
#include "work_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

// How the copy engine finds the tensors: [D, heads, S, B], of the bias [Sk, Sq, heads, 1].
struct PairBiasBwdMaps {
    CUtensorMap query, out, dout, key, value, bias;
};

struct PairBiasRowInfo {
    // Of two rows the lse of both, times log2(e), inf where a row sees nothing; then D_i of both.
    float4 twos[kPairBiasRows / 2];

    __device__ __forceinline__ float& lse(int row) { return reinterpret_cast<float*>(twos)[row / 2 * 4 + row % 2]; }
    __device__ __forceinline__ float& delta(int row) { return (&lse(row))[2]; }
};

// Of kPairBiasRows rows, two a lane, 2 lane_id() and the next; on its way from memory before there is room for it.
struct PairBiasRowStats {
    float lse[2], delta[2];

    // `of_delta`: D_i, or a part of it, absent where that is 0.
    __device__ PairBiasRowStats(const BwdArgs& p, const RowStatView& of_delta, const Sequence& s, int head,
                                int first_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + 2 * lane_id() + i;
            const bool exists = row < s.rows;
            const auto stat = [&](const RowStatView& view) {
                return exists ? static_cast<const float*>(view.data)[stat_offset(view, s, head) + row] : 0.f;
            };
            lse[i] = lse_to_log2(stat(p.lse), exists);
            delta[i] = lse[i] == kInfinity || of_delta.data == nullptr ? 0.f : stat(of_delta);
        }
    }
    // Rows that see nothing, and those beyond the sequence, may hold anything: zeros take their place.
    template <typename... Tiles>
    __device__ __forceinline__ void clear_empty(Tiles&... tiles) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lse[i] == kInfinity) (clear_row(tiles, 2 * lane_id() + i), ...);
    }
};

}  // namespace flash_dmattn::cuda::sm90
