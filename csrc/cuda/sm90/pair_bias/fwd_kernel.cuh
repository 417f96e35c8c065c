// The pair bias forward kernel: one producer warpgroup, two or three MMA warpgroups of 64 query rows each.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "fwd_consumer.cuh"
#include "fwd_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                         const __grid_constant__ PairBiasFwdTensorMaps maps) {
    grid_dependency_sync();
    auto& smem = init_shared_storage<PairBiasFwdSharedStorage<Traits>>();
    const PairBiasWorkTile work_tile(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasFwdProducer<Traits>(p, schedule, maps, smem, work_tile).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasFwdConsumer<Traits>(p, schedule, smem, work_tile).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
