// Bit vectors of visible keys or rows, 32 per word.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Word `word` of a bit vector whose first `limit` bits are 1.
__device__ __forceinline__ uint32_t bits_below(int limit, int word) {
    uint32_t others;  // shl.b32 by 32 or more returns 0; C++ leaves it undefined
    asm("shl.b32 %0, %1, %2;" : "=r"(others) : "r"(~0u), "r"(max(limit - word * 32, 0)));
    return ~others;
}

// The same with 1 in bits [begin, end).
__device__ __forceinline__ uint32_t bits_between(int begin, int end, int word) {
    return bits_below(end, word) & ~bits_below(begin, word);
}

// Number of set bits of a ballot below this lane.
__device__ __forceinline__ int rank_in(uint32_t ballot) { return __popc(ballot & ((1u << lane_id()) - 1)); }

// Transposes the 32 x 32 bits of each word across the warp: bit j of lane i becomes bit i of lane j.
template <int kWords>
__device__ __forceinline__ void transpose_bits(uint32_t (&words)[kWords]) {
    uint32_t low_half = 0x0000ffff;  // the lower half of each 2 * step bits
#pragma unroll
    for (int step = 16; step > 0; step /= 2, low_half ^= low_half << step) {
        const bool upper = lane_id() & step;
        const uint32_t kept_bits = upper ? ~low_half : low_half;
#pragma unroll
        for (uint32_t& word : words) {
            const uint32_t other = __shfl_xor_sync(~0u, word, step);
            const uint32_t moved = __funnelshift_l(other, other, upper ? 32 - step : step);
            word = (word & kept_bits) | (moved & ~kept_bits);
        }
    }
}

}  // namespace flash_dmattn::cuda
