// Intervals of short sequences in one launch: a CTA sorts a sequence and finds when its keys are evicted.
#pragma once

#include "sequences.cuh"

namespace flash_dmattn::cuda {

constexpr int64_t kShortSequence = 8192;  // keys at most

// max_keys: upper bound of a sequence's keys. float16, bfloat16 and float32.
void select_short_sequences(const Sequences& sequences, const BiasView& bias, int64_t max_keys, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
