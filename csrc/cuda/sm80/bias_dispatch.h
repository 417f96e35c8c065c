// From a run-time BiasKind to a compile-time one.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "params.h"

namespace flash_dmattn::cuda::sm80 {

// Calls run(std::integral_constant<BiasKind, kind>{}).
template <typename Run>
void dispatch_bias(BiasKind kind, const Run& run) {
    switch (kind) {
        case BiasKind::kNone: return run(std::integral_constant<BiasKind, BiasKind::kNone>{});
        case BiasKind::kKey: return run(std::integral_constant<BiasKind, BiasKind::kKey>{});
        case BiasKind::kDense: return run(std::integral_constant<BiasKind, BiasKind::kDense>{});
        default: throw std::logic_error("kind of bias");
    }
}

}  // namespace flash_dmattn::cuda::sm80
