// Intervals of a few sequences: blocks share each of them, in one launch.
#pragma once

#include "sequences.cuh"

namespace flash_dmattn::cuda {

// Whether that is the fastest way: sequences of fixed length, neither short nor longer than a block holds, so few that all
// blocks run at once, and of which keys are driven out. float16, bfloat16 and float32.
bool suits_chunks(const SelectParams& params);

void select_chunked_sequences(const Sequences& sequences, const BiasView& bias, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
