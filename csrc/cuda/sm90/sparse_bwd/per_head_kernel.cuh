// The per-head sparse backward kernel.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "per_head_consumer.cuh"
#include "per_head_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    per_head_sparse_bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ SparseBwdTensorMaps maps,
                               const __grid_constant__ BwdScale scale) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    auto& smem = dynamic_shared_storage<PerHeadSparseBwdSharedStorage<Traits>>();
    if (threadIdx.x == 0) {
        const PerHeadSparseBwdWorkTile work_tile(p, blockIdx.x, Traits::kRows);
        smem.work_tile() = work_tile;
        if (!work_tile.is_empty()) {
            const KeyList list(p, work_tile.s, work_tile.head, work_tile.first_row);
            smem.list() = list;
            smem.num_n_blocks = list.template count_n_blocks<Traits::kKeys>(
                p, work_tile.s, min(work_tile.first_row + Traits::kRows, work_tile.s.rows));
        }
        smem.init_pipelines();
    }
    __syncthreads();
    if (smem.work_tile().is_empty()) return;
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PerHeadSparseBwdProducer<Traits, kBias>(p, maps, smem).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PerHeadSparseBwdConsumer<Traits, kBias>(p, scale, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
