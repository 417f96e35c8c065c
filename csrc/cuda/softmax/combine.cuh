// Split-KV reduction: out = sum over splits s of exp(lse_s - lse) out_s, in the order of the splits. The last CTA to
// finish computes it.
#pragma once

#include "cuda/plan.h"
#include "cuda/common/basics.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// Returns whether this CTA is the last of `num_ctas` to increment the counter. Then the writes of the others are visible.
// All threads of the CTA call; `arrivals` is in shared memory.
__device__ __forceinline__ bool is_last_cta(int32_t* counter, int num_ctas, int& arrivals) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrivals = atomicAdd(counter, 1);
    __syncthreads();
    if (arrivals != num_ctas - 1) return false;
    __threadfence();
    return true;
}

// Index of a row in FwdArgs::split_lse, and of its vector in split_out.
__device__ __forceinline__ int64_t split_index(const FwdArgs& p, const Sequence& s, int split, int head, int row) {
    return ((static_cast<int64_t>(split) * p.batch + s.batch) * p.heads + head) * p.seqlen_q + row;
}

// One warp combines out and lse of one row. Not inlined, to keep its registers out of the mainloop.
template <typename T, int kHeadDim>
__device__ __noinline__ void combine_row(const FwdArgs& p, const Sequence& s, int head, int row) {
    constexpr int kSteps = ceil_div(kHeadDim, 64);  // two columns per lane
    const int num_splits = static_cast<int>(p.num_splits), head_dim = static_cast<int>(p.head_dim);
    const int64_t first = split_index(p, s, 0, head, row), stride = p.batch * p.heads * p.seqlen_q;
    static_assert(FwdPlan::kMaxSplits == 64, "two per lane");
    float weights[2], largest = -kInfinity;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int split = i * 32 + lane_id();
        weights[i] = split < num_splits ? __ldcg(p.split_lse + split * stride + first) : -kInfinity;
        largest = fmaxf(largest, weights[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float shift = largest == -kInfinity ? 0.f : largest;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) total += weights[i] = expf(weights[i] - shift);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);

    float2 sum[kSteps] = {};
#pragma unroll 4
    for (int split = 0; split < num_splits; ++split) {
        const float weight = __shfl_sync(~0u, split < 32 ? weights[0] : weights[1], split % 32);
        if (weight == 0) continue;  // a split without visible keys has not written split_out
        const float* from = p.split_out + (split * stride + first) * p.head_dim;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int col = step * 64 + lane_id() * 2;
            if (col >= head_dim) continue;
            const float2 x = __ldcg(reinterpret_cast<const float2*>(from + col));
            sum[step].x += weight * x.x;
            sum[step].y += weight * x.y;
        }
    }
    const float inverse = total == 0 ? 0.f : 1.f / total;
    T* out = query_rows<T>(p.out, s, head) + row * p.out.row_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int col = step * 64 + lane_id() * 2;
        if (col < head_dim)
            *reinterpret_cast<uint32_t*>(out + col) = pack<T>(sum[step].x * inverse, sum[step].y * inverse);
    }
    if (lane_id() == 0)
        static_cast<float*>(p.lse.data)[stat_offset(p.lse, s, head) + row] =
            total == 0 ? -kInfinity : shift + logf(total);
}

}  // namespace flash_dmattn::cuda
