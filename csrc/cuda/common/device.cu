#include <map>
#include <mutex>
#include <set>

#include "check.h"
#include "device.h"

namespace flash_dmattn::cuda {
namespace {

__global__ void probe_kernel() {}  // tells for which architecture the loaded code was compiled

struct Entry {
    Device facts;
    std::set<const void*> allowed;  // kernels that have been given their shared memory
};

int attribute(int device, cudaDeviceAttr what) {
    int value = 0;
    FLASH_CUDA_CHECK(cudaDeviceGetAttribute(&value, what, device));
    return value;
}

Entry ask(int device) {
    cudaFuncAttributes probe;
    FLASH_CUDA_CHECK(cudaFuncGetAttributes(&probe, probe_kernel));
    return {{attribute(device, cudaDevAttrMultiProcessorCount), attribute(device, cudaDevAttrL2CacheSize),
             attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin),
             attribute(device, cudaDevAttrComputeCapabilityMajor) * 10 +
                 attribute(device, cudaDevAttrComputeCapabilityMinor),
             probe.ptxVersion * 10},
            {}};
}

std::mutex mutex;

// Of the current device; entries stay where they are. `mutex` is held.
Entry& current_entry() {
    static std::map<int, Entry> entries;
    int device = 0;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    const auto found = entries.find(device);
    return found != entries.end() ? found->second : entries.emplace(device, ask(device)).first->second;
}

}  // namespace

const Device& current_device() {
    const std::lock_guard<std::mutex> lock(mutex);
    return current_entry().facts;
}

void allow_shared_memory(const void* kernel, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    Entry& entry = current_entry();
    if (entry.allowed.count(kernel) != 0) return;
    FLASH_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    entry.allowed.insert(kernel);
}

}  // namespace flash_dmattn::cuda
