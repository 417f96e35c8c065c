#include "clear.h"

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/basics.cuh"
#include "cuda/common/check.h"
#include "cuda/common/launch.h"
#include "cuda/mask/device_dispatch.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 8;  // of 16 bytes, for each thread

__global__ void __launch_bounds__(kThreads)
    clear_kernel(const __grid_constant__ AttentionParams p, uint4* memory, int64_t chunks) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kChunks + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
        if (const int64_t chunk = first + i * kThreads; chunk < chunks) memory[chunk] = uint4{};
}

}  // namespace

void clear(const AttentionParams& params, void* memory, int64_t bytes, cudaStream_t stream) {
    if (bytes == 0) return;
    if (params.device_dispatch.begins == nullptr) {
        FLASH_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream));
        return;
    }
    const int64_t chunks = bytes / static_cast<int64_t>(sizeof(uint4));
    launch(clear_kernel, {grid_of(ceil_div<int64_t>(chunks, kThreads * kChunks)), kThreads}, stream, params,
           static_cast<uint4*>(memory), chunks);
}

}  // namespace flash_dmattn::cuda
