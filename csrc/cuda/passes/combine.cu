// The results of blocks that each saw a part of the keys, to one: out = sum of exp(lse_s - lse) out_s.
#include "combine.h"

#include <algorithm>

#include "../common/check.h"
#include "../common/ptx.cuh"
#include "../common/sequence.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kWarps = 4;

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ half_t from_float(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bfloat16_t from_float(float x) { return __float2bfloat16_rn(x); }

// One warp a row.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) combine_kernel(const __grid_constant__ FwdArgs p) {
    const int64_t rows = p.batch * p.heads * p.seqlen_q;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
    if (index >= rows) return;
    const int row = static_cast<int>(index % p.seqlen_q);
    const int head = static_cast<int>(index / p.seqlen_q % p.heads);
    const Sequence s(p, static_cast<int>(index / p.seqlen_q / p.heads));
    if (row >= s.rows) return;

    float largest = -kInfinity;
    for (int split = lane_id(); split < p.splits; split += 32) largest = fmaxf(largest, p.split_lse[split * rows + index]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    const float shift = largest == -kInfinity ? 0.f : largest;
    float total = 0;
    for (int split = lane_id(); split < p.splits; split += 32) total += expf(p.split_lse[split * rows + index] - shift);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    const bool empty = total == 0;
    const float lse = empty ? -kInfinity : shift + logf(total);
    if (lane_id() == 0) static_cast<float*>(p.lse.data)[stat_offset(p.lse, s, head) + row] = lse;

    T* out = static_cast<T*>(p.out.data) + query_offset(p.out, s, head) + row * p.out.row_stride;
    for (int64_t d = lane_id(); d < p.head_dim; d += 32) {
        float sum = 0;
        for (int split = 0; split < p.splits; ++split) {
            const float split_lse = p.split_lse[split * rows + index];
            // A part without a visible key has written nothing.
            if (split_lse == -kInfinity) continue;
            sum += expf(split_lse - lse) * p.split_out[(split * rows + index) * p.head_dim + d];
        }
        out[d] = from_float<T>(sum);
    }
}

}  // namespace

void combine_splits(const FwdArgs& args, cudaStream_t stream) {
    const int64_t blocks = ceil_div<int64_t>(args.batch * args.heads * args.seqlen_q, kWarps);
    const auto kernel = args.dtype == DataType::kFloat16 ? combine_kernel<half_t> : combine_kernel<bfloat16_t>;
    kernel<<<grid_of(blocks), kWarps * 32, 0, stream>>>(args);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_dmattn::cuda
