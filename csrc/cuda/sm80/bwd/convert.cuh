// Postprocess: float32 dQ in the main kernel's register order to rows of the query's dtype.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// One CTA per m_block.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads) convert_dquery_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    using T = typename Traits::T;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& rows = *reinterpret_cast<typename Traits::RowsTile*>(shared_memory);

    const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows), heads = static_cast<int>(p.heads);
    const int m_block = blockIdx.x % num_m_blocks;
    const int head = blockIdx.x / num_m_blocks % heads;
    const Sequence s(p, blockIdx.x / num_m_blocks / heads);
    const int first_row = m_block * Traits::kRows;
    if (first_row >= s.rows) return;

    const int64_t tile = dquery_tile<Traits::kRows>(p, s, head, m_block);
    const float* from = p.dquery_accum + tile * Traits::kRows * Traits::kHeadDim + threadIdx.x * 4;
    float dquery[Traits::kDqM][Traits::kDqN][4];
#pragma unroll
    for (int m = 0; m < Traits::kDqM; ++m)
#pragma unroll
        for (int n = 0; n < Traits::kDqN; ++n) {
            const float4 x = *reinterpret_cast<const float4*>(from + (m * Traits::kDqN + n) * Traits::kThreads * 4);
            dquery[m][n][0] = x.x, dquery[m][n][1] = x.y, dquery[m][n][2] = x.z, dquery[m][n][3] = x.w;
        }
    const int warp = warp_id();
    using Rows = SmemFragments<typename Traits::RowsTile, MatrixOrder::kColMajor>;
    const uint32_t corner =
        Rows::lane_offset(warp / Traits::kDqColWarps * Traits::kDqRows, warp % Traits::kDqColWarps * 16);
    store_accumulator<T, Traits::kDqColWarps * 16>(dquery, Rows(smem_address(&rows), corner),
                                                   static_cast<float>(p.softmax_scale));
    __syncthreads();
    T* to = query_rows<T>(p.dquery, s, head) + first_row * p.dquery.row_stride;
    copy_tile_out<Traits::kThreads>(rows, to, p.dquery.row_stride, s.rows - first_row, static_cast<int>(p.head_dim));
}

}  // namespace flash_dmattn::cuda::sm80
