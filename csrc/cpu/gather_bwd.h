#pragma once

#include "params.h"

namespace flash_dmattn {

// The backward over key lists. params.delta is filled before.
template <typename acc_t>
void gather_bwd(const BwdParams& params);

}  // namespace flash_dmattn
