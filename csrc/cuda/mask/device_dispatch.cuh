// Device-side dispatch between key lists and dense blocks.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda {

// Whether the device selected the other path: a kernel of the dense path when lists were built, and the reverse. An
// inactive launch returns at once.
__device__ __forceinline__ bool is_inactive(const AttentionParams& p) {
    return p.device_dispatch.begins != nullptr && (*p.device_dispatch.begins >= 0) != p.device_dispatch.by_lists;
}

}  // namespace flash_dmattn::cuda
