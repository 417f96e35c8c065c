// What is launched in vain.
#pragma once

#include "../../params.h"

namespace flash_dmattn::cuda {

// Whether the call goes the other way: by tiles where lists were made, or by lists where none were.
__device__ __forceinline__ bool is_in_vain(const AttentionParams& p) {
    return p.way.begins != nullptr && (*p.way.begins >= 0) != p.way.by_lists;
}

}  // namespace flash_dmattn::cuda
