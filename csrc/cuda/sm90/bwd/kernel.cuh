// The kernels of the backward: the main kernel, and the conversion of dQ from float32.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/packed_blocks.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "consumer.cuh"
#include "producer.cuh"
#include "tile_scheduler.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ BwdTensorMaps maps,
               const __grid_constant__ BwdScale scale, const __grid_constant__ BwdLaunchRange range) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    auto& smem = dynamic_shared_storage<BwdSharedStorage<Traits, kBias>>();
    if (threadIdx.x == 0) {
        if (p.tile_count_semaphore != nullptr)
            smem.work_index = atomicAdd(p.tile_count_semaphore, 1) - range.first * range.num_n_blocks;
        smem.init_pipelines();
    }
    __syncthreads();
    const int work_index = p.tile_count_semaphore != nullptr ? smem.work_index : static_cast<int>(blockIdx.x);
    const BwdWorkTile work_tile(p, range, work_index, Traits::kKeys);
    if (threadIdx.x == 0) {
        smem.sequence = Sequence(p, work_tile.batch);
        smem.bias_batch = shared_batch(p.bias, smem.sequence);
    }
    if (threadIdx.x < Traits::kConsumerWarpgroups) smem.held_dq_semaphore[threadIdx.x] = nullptr;
    __syncthreads();
    if (work_tile.n_block * Traits::kKeys >= smem.sequence.keys) return;
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        BwdProducer<Traits, kBias>(p, maps, scale, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        BwdConsumer<Traits, kBias>(p, scale, smem, work_tile).run();
    }
}

// Scales dQ of the launch's heads and converts it from dquery_accum to rows of the query's dtype. One CTA for each
// m_block. first_head: of packed sequences a head, else an index over batch elements and heads. clears: zeroes the
// tiles for the next launch.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kConsumerWarpgroups * kWarpgroupThreads)
    convert_dquery_kernel(const __grid_constant__ BwdArgs p, int first_head, bool clears) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    using T = typename Traits::T;
    using Layout = DqueryLayout<Traits>;
    constexpr int kRows = Traits::kRows;
    const int num_m_blocks = static_cast<int>(p.dquery_m_blocks), heads = static_cast<int>(p.heads);
    const int number = blockIdx.x % num_m_blocks, index = first_head + blockIdx.x / num_m_blocks;
    const int head = index % heads;
    const NumberedMBlock m_block(p, p.cu_seqlens_q != nullptr, number, index / heads, kRows);
    const Sequence s(p, m_block.batch);
    if (m_block.first_row >= s.rows) return;
    const BwdTiledMma<Traits> tiled_mma(threadIdx.x / kWarpgroupThreads);
    const int64_t tile = first_head * p.dquery_m_blocks + blockIdx.x;
    float* const from = p.dquery_accum + tile * Layout::kSize + Layout::offset(warp_id(), 0, lane_id());
    typename BwdTiledMma<Traits>::DqFragment dq;
#pragma unroll
    for (int n = 0; n < Layout::kFragments; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(from + Layout::offset(0, n, 0));
        dq[0][n][0] = x.x, dq[0][n][1] = x.y, dq[0][n][2] = x.z, dq[0][n][3] = x.w;
    }
    if (clears) {  // after all loads: the compiler moves no load across a store
#pragma unroll
        for (int n = 0; n < Layout::kFragments; ++n)
            *reinterpret_cast<float4*>(from + Layout::offset(0, n, 0)) = {};
    }
    const float scale = static_cast<float>(p.softmax_scale);
    const int first_row = m_block.first_row + tiled_mma.dq_row(), first_col = tiled_mma.dq_col(),
              warp_row = warp_id() % 4 * 16;  // of the accumulator
    if constexpr (Traits::kTransposesDq) {
        const int col = first_col + warp_row;
        T* const to = query_rows<T>(p.dquery, s, head) + first_row * p.dquery.row_stride + col;
        store_transposed(dq, scale, to, p.dquery.row_stride, s.rows - first_row, static_cast<int>(p.head_dim) - col);
    } else {
        T* const to = query_rows<T>(p.dquery, s, head) + first_col;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_row + warp_row + h * 8 + fragment_row();
            store_row(dq, h, scale, to + row * p.dquery.row_stride, static_cast<int>(p.head_dim) - first_col,
                      row < s.rows);
        }
    }
}

}  // namespace flash_dmattn::cuda::sm90
