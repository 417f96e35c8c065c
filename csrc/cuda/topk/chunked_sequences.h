// Intervals of few sequences in one launch: several CTAs share a sequence.
#pragma once

#include "sequences.cuh"

namespace flash_dmattn::cuda {

// Whether this is the fastest path: fixed length, neither short nor longer than a CTA holds, few enough that all CTAs
// run at once, and some keys are evicted. float16, bfloat16 and float32.
bool suits_chunks(const SelectParams& params);

void select_chunked_sequences(const Sequences& sequences, const BiasView& bias, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
