// What the host must know of the device that a launch goes to.
#pragma once

#include <cstdint>

namespace flash_dmattn::cuda {

struct Device {
    int num_sms;
    int64_t l2_bytes;
    int64_t shared_memory;  // the most that a block may have, in bytes
    int capability;         // 90 for 9.0
    int code;  // the architecture, as __CUDA_ARCH__ has it, of the code that was loaded: not always the device's own
};

// The current device; the runtime is asked once for each.
const Device& current_device();

// Lets the blocks of a kernel have so much shared memory on the current device; the runtime is told once.
void allow_shared_memory(const void* kernel, int64_t bytes);

}  // namespace flash_dmattn::cuda
