// The prologue of warp-specialized kernels.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

constexpr int kSmemTileAlign = 1024;  // bytes; TMA and wgmma need it for swizzled tiles

struct Empty {};  // the type of a member that a kernel does not have

// Returns the CTA's dynamic shared memory as a SharedStorage whose pipelines are initialized. All threads call.
template <typename SharedStorage>
__device__ __forceinline__ SharedStorage& init_shared_storage() {
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<SharedStorage*>(raw_smem);
    if (threadIdx.x == 0) smem.init_pipelines();
    __syncthreads();
    return smem;
}

}  // namespace flash_dmattn::cuda
