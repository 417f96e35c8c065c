// Launches the decoding kernel of one head dimension and dtype.
#pragma once

#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "kernel.cuh"
#include "plan.h"

namespace flash_dmattn::cuda::sm90 {

template <typename T, int kHeadDim, int kWarps>
void run_decode_with(const DecodeArgs& args, cudaStream_t stream, int* max_active_clusters) {
    auto* kernel = decode_kernel<T, kHeadDim, kWarps>;
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
    if (max_active_clusters != nullptr) {
        FLASH_CUDA_CHECK(cudaOccupancyMaxActiveClusters(max_active_clusters, kernel, &config));
    } else {
        FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args));
    }
}

template <typename T, int kHeadDim>
void run_decode(const DecodeArgs& args, cudaStream_t stream, int* max_active_clusters) {
    if constexpr (kHeadDim <= kDecodeManyWarpsHeadDim) {
        if (args.warps == kDecodeMaxWarps)
            return run_decode_with<T, kHeadDim, kDecodeMaxWarps>(args, stream, max_active_clusters);
    }
    run_decode_with<T, kHeadDim, kDecodeMinWarps>(args, stream, max_active_clusters);
}

}  // namespace flash_dmattn::cuda::sm90
