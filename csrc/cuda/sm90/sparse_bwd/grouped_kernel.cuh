// The grouped sparse backward kernel.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "grouped_consumer.cuh"
#include "grouped_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    grouped_sparse_bwd_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ SparseBwdTensorMaps maps,
                              const __grid_constant__ BwdScale scale,
                              const __grid_constant__ GroupedSparseBwdTileSchedulerParams scheduler) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    auto& smem = dynamic_shared_storage<GroupedSparseBwdSharedStorage<Traits>>();
    if (threadIdx.x == 0) {
        // A CTA that waits for a slot has a higher index than those that empty it: they have started.
        const GroupedSparseBwdWorkTile work_tile(p, scheduler, atomicAdd(p.tile_count_semaphore, 1));
        smem.work_tile() = work_tile;
        int num_n_blocks = 0;
        if (!work_tile.is_empty()) {
            const KeyList list(p, work_tile.s, work_tile.head, work_tile.first_row);
            smem.list() = list;
            num_n_blocks = list.template count_n_blocks<Traits::kKeys>(p, work_tile.s, work_tile.end_row);
        }
        smem.first_n_block = static_cast<int>(scheduler.list_splits.quotient(num_n_blocks * work_tile.split));
        smem.end_n_block = static_cast<int>(scheduler.list_splits.quotient(num_n_blocks * (work_tile.split + 1)));
        smem.init_pipelines();
    }
    __syncthreads();
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        GroupedSparseBwdProducer<Traits, kBias>(p, maps, smem).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        GroupedSparseBwdConsumer<Traits, kBias>(p, scale, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
