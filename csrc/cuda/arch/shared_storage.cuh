// Dynamic shared memory of kernels that use TMA and wgmma.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

constexpr int kSmemTileAlign = 1024;  // bytes; TMA and wgmma need it for swizzled tiles

struct Empty {};  // the type of a member that a kernel does not have

// The CTA's dynamic shared memory.
template <typename SharedStorage>
__device__ __forceinline__ SharedStorage& dynamic_shared_storage() {
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    return *reinterpret_cast<SharedStorage*>(raw_smem);
}

// The same with initialized pipelines. All threads call.
template <typename SharedStorage>
__device__ __forceinline__ SharedStorage& init_shared_storage() {
    auto& smem = dynamic_shared_storage<SharedStorage>();
    if (threadIdx.x == 0) smem.init_pipelines();
    __syncthreads();
    return smem;
}

}  // namespace flash_dmattn::cuda
