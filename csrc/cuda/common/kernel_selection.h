// Which instantiation serves a call.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "params.h"
#include "basics.cuh"

namespace flash_dmattn::cuda {

// Asked by rising head dimension: the first that does is the one.
template <typename T, int kHeadDim>
bool serves(const AttentionParams& p) {
    constexpr DataType kDtype = std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16;
    return p.head_dim <= kHeadDim && p.dtype == kDtype;
}

inline void require_built(const char* what, const AttentionParams& p, int head_dim) {
    if (head_dim == 0)
        throw std::runtime_error("no " + std::string(what) + " kernel was built for this dtype and head dimension " +
                                 std::to_string(p.head_dim) + ": see FLASH_DMATTN_DTYPES and FLASH_DMATTN_HEAD_DIMS");
}

}  // namespace flash_dmattn::cuda
