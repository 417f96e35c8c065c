// What the backward is told of query rows: lse and D_i, where a dense bias is shared by batch elements.
#pragma once

#include "../common/scores.cuh"
#include "pair_block.cuh"

namespace flash_dmattn::cuda::sm90 {

// How the copy engine finds the tensors: [D, heads, S, B], of the bias [Sk, Sq, heads, 1].
struct PairBwdMaps {
    CUtensorMap query, dout, key, value, bias;
};

struct PairRowInfo {
    alignas(16) float lse[kPairRows];  // times log2(e); inf where a row sees nothing
    alignas(16) float delta[kPairRows];
};

// Of kPairRows rows, two a lane; on its way from memory before there is room for it.
class PairRowStats {
public:
    __device__ PairRowStats(const BwdArgs& p, const Sequence& s, int head, int first_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = first_row + lane_id() + i * 32;
            const bool exists = row < s.rows;
            const auto stat = [&](const RowStatView& view) {
                return exists ? static_cast<const float*>(view.data)[stat_offset(view, s, head) + row] : 0.f;
            };
            lse_[i] = lse_to_log2(stat(p.lse), exists);
            delta_[i] = lse_[i] == kInfinity ? 0.f : stat(p.delta);
        }
    }
    // Rows that see nothing, and those beyond the sequence, may hold anything: zeros take their place.
    template <typename Tile>
    __device__ __forceinline__ void hand_over(PairRowInfo& info, Tile& query, Tile& dout) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = lane_id() + i * 32;
            info.lse[r] = lse_[i];
            info.delta[r] = delta_[i];
            if (lse_[i] != kInfinity) continue;
            clear_row(query, r);
            clear_row(dout, r);
        }
    }

private:
    float lse_[2], delta_[2];
};

}  // namespace flash_dmattn::cuda::sm90
