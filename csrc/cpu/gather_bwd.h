#pragma once

#include "params.h"

namespace flash_dmattn {

// The backward over lists of keys, after row_deltas.
template <typename acc_t>
void gathered_backward(const BwdParams& params);

}  // namespace flash_dmattn
