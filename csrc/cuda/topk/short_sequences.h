// Intervals of sequences that one block sorts and splits whole: one launch.
#pragma once

#include "sequences.cuh"

namespace flash_dmattn::cuda {

constexpr int64_t kShortSequence = 8192;  // keys at most

// longest: no sequence has more keys. float16, bfloat16 and float32.
void select_short_sequences(const Sequences& sequences, const BiasView& bias, int64_t longest, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
