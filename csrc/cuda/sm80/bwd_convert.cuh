// dQ from float32, as the main kernel's registers held it, to rows of the query's dtype.
#pragma once

#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// One block a tile of rows.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) convert_dquery_kernel(const __grid_constant__ BwdArgs p) {
    if (is_in_vain(p)) return;
    using T = typename Tile::T;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& rows = *reinterpret_cast<typename Tile::RowsTile*>(shared_memory);

    const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), Tile::kRows), heads = static_cast<int>(p.heads);
    const int row_tile = blockIdx.x % row_tiles;
    const int head = blockIdx.x / row_tiles % heads;
    const Sequence s(p, blockIdx.x / row_tiles / heads);
    const int first_row = row_tile * Tile::kRows;
    if (first_row >= s.rows) return;

    const int64_t tile = dquery_tile<Tile::kRows>(p, s, head, row_tile);
    const float* from = p.dquery_accum + tile * Tile::kRows * Tile::kHeadDim + threadIdx.x * 4;
    float dquery[Tile::kDqM][Tile::kDqN][4];
#pragma unroll
    for (int m = 0; m < Tile::kDqM; ++m)
#pragma unroll
        for (int n = 0; n < Tile::kDqN; ++n) {
            const float4 x = *reinterpret_cast<const float4*>(from + (m * Tile::kDqN + n) * Tile::kThreads * 4);
            dquery[m][n][0] = x.x, dquery[m][n][1] = x.y, dquery[m][n][2] = x.z, dquery[m][n][3] = x.w;
        }
    const int warp = warp_id();
    using Rows = Blocks<typename Tile::RowsTile, BlockOrder::kBelowFirst>;
    const uint32_t corner =
        Rows::lane_offset(warp / Tile::kDqColWarps * Tile::kDqRows, warp % Tile::kDqColWarps * 16);
    store_rounded<T, Tile::kDqColWarps * 16>(dquery, Rows(smem_address(&rows), corner),
                                             static_cast<float>(p.softmax_scale));
    __syncthreads();
    T* to = static_cast<T*>(p.dquery.data) + query_offset(p.dquery, s, head) + first_row * p.dquery.row_stride;
    copy_tile_out<Tile::kThreads>(rows, to, p.dquery.row_stride, s.rows - first_row, static_cast<int>(p.head_dim));
}

}  // namespace flash_dmattn::cuda::sm80
