// Shared memory of a block on the current device.
#pragma once

#include <stdexcept>
#include <string>

#include "device.h"

namespace flash_dmattn::cuda {

constexpr int kSharedMemoryOfAnyBlock = 48 * 1024;  // needs no leave

template <typename SharedStorage>
bool fits_shared_memory() {
    constexpr int64_t kBytes = sizeof(SharedStorage);
    return kBytes <= kSharedMemoryOfAnyBlock || kBytes <= current_device().shared_memory;
}

// A message for people where `needed` bytes are more than there are.
inline void require_shared_memory(const char* what, int64_t head_dim, int64_t needed, int64_t available) {
    if (needed <= available) return;
    throw std::runtime_error(std::string(what) + " of head dimension " + std::to_string(head_dim) + " needs " +
                             std::to_string((needed + 1023) / 1024) + " KiB of shared memory a block, this GPU has " +
                             std::to_string(available / 1024) + ": see 'What runs where' in README.md");
}

// `bytes` are the same whenever a kernel is launched.
template <typename Kernel>
void allow_shared_memory(const char* what, int64_t head_dim, Kernel* kernel, int64_t bytes) {
    if (bytes <= kSharedMemoryOfAnyBlock) return;
    require_shared_memory(what, head_dim, bytes, current_device().shared_memory);
    allow_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
}

}  // namespace flash_dmattn::cuda
