// Launches the decoding kernel of one head dimension and dtype.
#pragma once

#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "kernel.cuh"
#include "plan.h"

namespace flash_dmattn::cuda::sm90 {

// Calls function(kernel, config) for a kernel of kWarps warps.
template <typename T, int kHeadDim, int kWarps, bool kPlain, typename Function>
void with_decode_kernel_of(const DecodeArgs& args, cudaStream_t stream, const Function& function) {
    auto* kernel = decode_kernel<T, kHeadDim, kWarps, kPlain>;
    allow_shared_memory(reinterpret_cast<const void*>(kernel), current_device().shared_memory);
    allow_largest_cluster(reinterpret_cast<const void*>(kernel));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(args.cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid_of(args.batch * args.kv_heads * args.cluster);
    config.blockDim = kWarps * 32;
    config.dynamicSmemBytes = DecodeSmemLayout(args, kHeadDim).total;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    function(kernel, config);
}

// The same for the number of warps of the plan.
template <typename T, int kHeadDim, bool kPlain, typename Function>
void with_decode_warps(const DecodeArgs& args, cudaStream_t stream, const Function& function) {
    if constexpr (kHeadDim <= kDecodeManyWarpsHeadDim) {
        if (args.warps == kDecodeMaxWarps)
            return with_decode_kernel_of<T, kHeadDim, kDecodeMaxWarps, kPlain>(args, stream, function);
    }
    with_decode_kernel_of<T, kHeadDim, kDecodeMinWarps, kPlain>(args, stream, function);
}

// The same for the kernel of the plan.
template <typename T, int kHeadDim, typename Function>
void with_decode_kernel(const DecodeArgs& args, cudaStream_t stream, const Function& function) {
    args.is_plain ? with_decode_warps<T, kHeadDim, true>(args, stream, function)
                  : with_decode_warps<T, kHeadDim, false>(args, stream, function);
}

template <typename T, int kHeadDim>
void run_decode(const DecodeArgs& args, cudaStream_t stream) {
    with_decode_kernel<T, kHeadDim>(args, stream, [&](auto* kernel, const cudaLaunchConfig_t& config) {
        FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
    });
}

template <typename T, int kHeadDim>
void max_active_decode_clusters(int* num_clusters, const DecodeArgs& args) {
    with_decode_kernel<T, kHeadDim>(args, nullptr, [&](auto* kernel, const cudaLaunchConfig_t& config) {
        FLASH_CUDA_CHECK(cudaOccupancyMaxActiveClusters(num_clusters, kernel, &config));
    });
}

}  // namespace flash_dmattn::cuda::sm90
