// What is launched in vain.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda {

// Whether the call goes the other way: by tiles where lists were made, or by lists where none were.
__device__ __forceinline__ bool is_inactive(const AttentionParams& p) {
    return p.device_dispatch.begins != nullptr && (*p.device_dispatch.begins >= 0) != p.device_dispatch.by_lists;
}

}  // namespace flash_dmattn::cuda
