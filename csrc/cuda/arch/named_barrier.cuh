// Named barriers: each kernel lists its own in an enum.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Named barrier `id` (1 to 15; 0 is __syncthreads) of a CTA, for `threads` threads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_dmattn::cuda
