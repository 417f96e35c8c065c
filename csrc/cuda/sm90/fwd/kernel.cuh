// The sm90 forward kernel: one producer warpgroup, two to four MMA warpgroups of 64 query rows each.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "consumer.cuh"
#include "gather_producer.cuh"
#include "masked_producer.cuh"
#include "unmasked_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ FwdKernelParams params,
               const __grid_constant__ FwdTensorMaps maps) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    auto& smem = init_shared_storage<FwdSharedStorage<T, kBias, Traits>>();
    if (threadIdx.x < kWarpgroupThreads) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        if constexpr (Traits::kGathers) {
            FwdGatherProducer<T, kBias, Traits>(p, params, maps, smem).run();
        } else if (!Traits::kServesMasks || !has_mask(p)) {
            FwdUnmaskedProducer<T, kBias, Traits>(p, params, maps, smem).run();
        } else {
            FwdMaskedProducer<T, kBias, Traits>(p, params, maps, smem).run();
        }
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        FwdConsumer<T, kBias, Traits>(p, params, smem).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
