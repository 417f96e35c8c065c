// Launches kernels: by programmatic dependent launch, if the loaded code is for compute capability 9.0 or above.
#pragma once

#include "check.h"
#include "device.h"

namespace flash_dmattn::cuda {

struct LaunchShape {
    dim3 grid;
    int threads;  // of a CTA
    int64_t shared_bytes = 0;
    int64_t cluster_size = 1;  // CTAs, along x; 1: no clusters
};

// The kernel's first statement is grid_dependency_sync() (arch/grid_dependency.cuh).
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.threads;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (shape.cluster_size > 1) {
        cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster_size), 1, 1};
    }
    if (current_device().cuda_arch >= 900) {  // code of older architectures does not wait
        cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
        dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent.val.programmaticStreamSerializationAllowed = 1;
    }
    FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace flash_dmattn::cuda
