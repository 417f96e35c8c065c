// Whether a kernel's shared memory fits on the current device.
#pragma once

#include <stdexcept>
#include <string>

#include "device.h"

namespace flash_dmattn::cuda {

constexpr int kDefaultSharedMemory = 48 * 1024;  // the limit of a CTA that needs no attribute, in bytes

template <typename SharedStorage>
bool fits_shared_memory() {
    constexpr int64_t kBytes = sizeof(SharedStorage);
    return kBytes <= kDefaultSharedMemory || kBytes <= current_device().shared_memory;
}

// Throws std::runtime_error where `needed` bytes exceed `available`.
inline void require_shared_memory(const char* what, int64_t head_dim, int64_t needed, int64_t available) {
    if (needed <= available) return;
    throw std::runtime_error(std::string(what) + " of head dimension " + std::to_string(head_dim) + " needs " +
                             std::to_string((needed + 1023) / 1024) + " KiB of shared memory a block, this GPU has " +
                             std::to_string(available / 1024) + ": see 'What runs where' in README.md");
}

// Raises the limit for a launch. `bytes` is the same for all launches of a kernel, because only the first sets it.
template <typename Kernel>
void allow_shared_memory(const char* what, int64_t head_dim, Kernel* kernel, int64_t bytes) {
    if (bytes <= kDefaultSharedMemory) return;
    require_shared_memory(what, head_dim, bytes, current_device().shared_memory);
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace flash_dmattn::cuda
