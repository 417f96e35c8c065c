// Warp specialization: the first warpgroup of a CTA is the producer, the others are the MMA (consumer) warpgroups.
#pragma once

#include "cuda/common/basics.cuh"
#include "fragment.cuh"
#include "wgmma.cuh"

namespace flash_dmattn::cuda {

// Each role calls its function with its share of the registers (setmaxnreg).
template <typename Traits, typename Produce, typename Consume>
__device__ __forceinline__ void run_warp_specialized(const Produce& produce, const Consume& consume) {
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        produce();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        consume();
    }
}

}  // namespace flash_dmattn::cuda
