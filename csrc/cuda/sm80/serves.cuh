// Which instantiation serves a call.
#pragma once

#include <type_traits>

#include "../../params.h"
#include "../common/ptx.cuh"

namespace flash_dmattn::cuda {

// Asked by rising head dimension: the first that does is the one.
template <typename T, int kHeadDim>
bool serves(const AttentionParams& p) {
    constexpr DataType kDtype = std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16;
    return p.head_dim <= kHeadDim && p.dtype == kDtype;
}

}  // namespace flash_dmattn::cuda
