// The pair bias kernels for dQ and dbias. A CTA owns an m_block of 64 rows; two MMA warpgroups each process half of the
// keys.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "dq_dbias_consumer.cuh"
#include "dq_dbias_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_dq_dbias_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                              const __grid_constant__ PairBiasBwdTensorMaps maps) {
    grid_dependency_sync();
    auto& smem = init_shared_storage<PairBiasDqDbiasSharedStorage<Traits>>();
    const PairBiasWorkTile work_tile(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasDqDbiasProducer<Traits>(p, maps, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasDqDbiasConsumer<Traits>(p, schedule, smem, work_tile).run();
    }
}

// Reduces the splits' partial dbias to the bias's dtype. A CTA of 128 threads reduces 64 rows by kPairBiasDbiasCols
// keys.
constexpr int kPairBiasDbiasCols = 32;

template <typename Traits>
__global__ void __launch_bounds__(128) pair_bias_dbias_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    using Bias = typename Traits::Bias;
    constexpr int kFragments = kPairBiasDbiasCols / 8, kColTiles = Traits::kAllNBlocks * 64 / kPairBiasDbiasCols;
    const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), kPairBiasRows);
    const int col = blockIdx.x % kColTiles * kPairBiasDbiasCols, m_block = blockIdx.x / kColTiles;
    if (col >= p.seqlen_k) return;
    float sum[1][kFragments][4] = {};
#pragma unroll 4
    for (int split = 0; split < p.dbias_splits; ++split) {
        const float* from = pair_bias_dbias_partial<Traits>(p, split, m_block, col / 64);
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            const float4 x = reinterpret_cast<const float4*>(from)[(col % 64 / 8 + n) * 128 + threadIdx.x];
            sum[0][n][0] += x.x, sum[0][n][1] += x.y, sum[0][n][2] += x.z, sum[0][n][3] += x.w;
        }
    }
    const int64_t head = m_block / num_m_blocks % p.heads, bias_batch = m_block / num_m_blocks / p.heads;
    Bias* to = static_cast<Bias*>(p.dbias.data) + bias_batch * p.dbias.batch_stride + head * p.dbias.head_stride + col;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int64_t row = m_block % num_m_blocks * kPairBiasRows + warp_id() * 16 + h * 8 + fragment_row();
        store_row(sum, h, 1, to + row * p.dbias.row_stride, static_cast<int>(p.seqlen_k) - col, row < p.seqlen_q);
    }
}

}  // namespace flash_dmattn::cuda::sm90
