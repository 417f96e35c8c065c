#include <map>
#include <mutex>
#include <set>

#include "check.h"
#include "device.h"

namespace flash_dmattn::cuda {
namespace {

__global__ void probe_kernel() {}  // its attributes report for which architecture the loaded code was compiled

struct Entry {
    Device device;
    std::set<const void*> with_shared_memory, with_largest_cluster;  // kernels whose limit is raised
};

int attribute(int device, cudaDeviceAttr name) {
    int value = 0;
    FLASH_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
}

Entry query(int device) {
    cudaFuncAttributes probe;
    FLASH_CUDA_CHECK(cudaFuncGetAttributes(&probe, probe_kernel));
    return {{attribute(device, cudaDevAttrMultiProcessorCount), attribute(device, cudaDevAttrL2CacheSize),
             attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin),
             attribute(device, cudaDevAttrComputeCapabilityMajor) * 10 +
                 attribute(device, cudaDevAttrComputeCapabilityMinor),
             probe.ptxVersion * 10},
            {},
            {}};
}

std::mutex mutex;

// The entry of the current device; references stay valid. The caller holds `mutex`.
Entry& current_entry() {
    static std::map<int, Entry> entries;
    int device = 0;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    const auto found = entries.find(device);
    return found != entries.end() ? found->second : entries.emplace(device, query(device)).first->second;
}

}  // namespace

const Device& current_device() {
    const std::lock_guard<std::mutex> lock(mutex);
    return current_entry().device;
}

void allow_shared_memory(const void* kernel, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    Entry& entry = current_entry();
    if (entry.with_shared_memory.count(kernel) != 0) return;
    FLASH_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    entry.with_shared_memory.insert(kernel);
}

void allow_largest_cluster(const void* kernel) {
    const std::lock_guard<std::mutex> lock(mutex);
    Entry& entry = current_entry();
    if (entry.with_largest_cluster.count(kernel) != 0) return;
    FLASH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    entry.with_largest_cluster.insert(kernel);
}

}  // namespace flash_dmattn::cuda
