// Order-preserving integers of a thread's neighbouring keys, and the digit histogram of a radix select over them.
#pragma once

#include "order.cuh"

namespace flash_dmattn::cuda {

constexpr int kDigit = 8, kBins = 1 << kDigit;
constexpr int kCopies = 16;  // of the histogram, against contention: high digits take few values
constexpr int kGroup = 8;    // neighbouring keys of a thread

// Order-preserving integers of neighbouring biases, packed as in memory. A masked key has kMaskedOrder.
template <DataType kType>
struct alignas(16) Group {
    using Bits = typename FloatBits<kType>::Bits;
    static constexpr int kPerWord = 4 / sizeof(Bits);
    static constexpr int kWords = kGroup / kPerWord;
    static constexpr uint32_t kMasked = kMaskedOrder<kType> * (kPerWord == 2 ? 0x10001u : 1u);

    uint32_t words[kWords];

    // Converts biases. largest_size: running maximum magnitude per half word, to detect NaN.
    __device__ void to_orders(uint32_t& largest_size) {
#pragma unroll
        for (uint32_t& word : words) {
            if constexpr (kPerWord == 2) {
                largest_size = __vmaxu2(largest_size, word & 0x7fff7fff);
                uint32_t negative;  // all bits of a half, or none
                asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(word));
                word = __vmaxu2((word ^ (negative | 0x80008000)) + (negative & 0x10001), kMasked);
            } else {
                largest_size = max(largest_size, word & ~FloatBits<kType>::kMinusZero);
                word = max(order_of<kType>(word), kMasked);
            }
        }
    }
    __device__ static bool has_nan(uint32_t largest_size) {
        constexpr uint32_t kMax = FloatBits<kType>::kInfinity;
        if constexpr (kPerWord == 2) return (largest_size & 0xffff) > kMax || largest_size >> 16 > kMax;
        return largest_size > kMax;
    }

    // Histograms the digit at bit kShift of each order that matches `known` above that digit. `counts` is the
    // shared-memory address of the bin of digit 0.
    template <int kShift>
    __device__ void count(uint32_t counts, uint32_t known) const {
        constexpr uint32_t kAbove = static_cast<Bits>(~Bits{0} << kShift << kDigit);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            const int half = i % kPerWord * 16;
            const uint32_t word = words[i / kPerWord];
            const uint32_t digit = __byte_perm(word, 0, 0x4440 + (kShift + half) / 8);
            const uint32_t differs = (word ^ known << half) & kAbove << half;
            const uint32_t to = counts + digit * (kCopies * 4);
            if (differs == 0) asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(to) : "memory");
        }
    }

    // Bit i: order i >= limit.
    __device__ uint32_t at_least(uint32_t limit) const {
        uint32_t mask = 0;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            const uint32_t word = words[i / kPerWord];
            bool holds;
            if constexpr (kPerWord == 2) {
                holds = (i % 2 == 0 ? word << 16 : word) >= limit << 16;
            } else {
                holds = word >= limit;
            }
            mask |= holds ? 1u << i : 0;
        }
        return mask;
    }
};

}  // namespace flash_dmattn::cuda
