// Launches a kernel whose CTAs may form clusters.
#pragma once

#include "check.h"

namespace flash_dmattn::cuda {

// ctas: of all clusters. cluster_size: 1 launches without clusters.
template <typename... Params, typename... Args>
void launch_in_clusters(void (*kernel)(Params...), unsigned ctas, int64_t cluster_size, int threads,
                        size_t shared_bytes, cudaStream_t stream, const Args&... args) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = ctas;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = cluster_size > 1 ? 1 : 0;
    FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace flash_dmattn::cuda
