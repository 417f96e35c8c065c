// Properties of the current device, cached for each device.
#pragma once

#include <cstdint>

namespace flash_dmattn::cuda {

struct Device {
    int num_sms;
    int64_t l2_bytes;
    int64_t shared_memory;  // the maximum of a CTA, in bytes
    int capability;         // compute capability: 90 for 9.0
    int cuda_arch;          // __CUDA_ARCH__ of the loaded code, which may be older than the device
};

const Device& current_device();

// Raises a kernel's limit of dynamic shared memory on the current device, at the first call.
void allow_shared_memory(const void* kernel, int64_t bytes);
// Raises a kernel's limit of CTAs in a cluster on the current device, at the first call.
void allow_largest_cluster(const void* kernel);

}  // namespace flash_dmattn::cuda
