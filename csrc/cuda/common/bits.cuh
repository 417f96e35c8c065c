// Bit vectors of visibility, 32 pairs a word.
#pragma once

#include "basics.cuh"

namespace flash_dmattn::cuda {

// The word `word` of a bit vector whose first `limit` bits are 1.
__device__ __forceinline__ uint32_t bits_below(int limit, int word) {
    const int bits = limit - word * 32;
    return bits >= 32 ? ~0u : bits <= 0 ? 0u : (1u << bits) - 1;
}

// How many lanes below this one are named in a ballot.
__device__ __forceinline__ int rank_in(uint32_t ballot) { return __popc(ballot & ((1u << lane_id()) - 1)); }

// Transposes 32 x 32 bits: of lane i, bit j becomes bit i of lane j.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t word) {
    uint32_t low_half = 0x0000ffff;  // of every 2 * step bits the lower ones
#pragma unroll
    for (int step = 16; step > 0; step /= 2, low_half ^= low_half << step) {
        const bool upper = lane_id() & step;
        const uint32_t other = __shfl_xor_sync(~0u, word, step), kept_bits = upper ? ~low_half : low_half;
        const uint32_t moved = __funnelshift_l(other, other, upper ? 32 - step : step);
        word = (word & kept_bits) | (moved & ~kept_bits);
    }
    return word;
}

}  // namespace flash_dmattn::cuda
