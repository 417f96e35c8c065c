// Order-preserving integers of a thread's neighbouring keys, and the digit histogram of a radix select over them.
#pragma once

#include "order.cuh"

namespace flash_dmattn::cuda {

constexpr int kDigit = 8, kBins = 1 << kDigit;
constexpr int kGroup = 8;  // neighbouring keys of a thread

// A histogram of digits in shared memory, with a bin for keys without a digit: for a conditional atomic ptxas emits a
// branch. Lanes of a warp that add to the same bin do not wait for each other (ATOMS.POPC.INC).
class DigitHistogram {
public:
    static constexpr int kWords = kBins + 4;  // padded: the next histogram is aligned to 16 bytes

    __device__ explicit DigitHistogram(uint32_t* counts) : counts_(counts) {}

    // Clears this histogram and those behind it, `histograms` in all. All threads call.
    __device__ void clear(int num_threads, int histograms = 1) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < histograms * kWords / 4; i += num_threads)
            reinterpret_cast<uint4*>(counts_)[i] = uint4{};
    }
    __device__ void add(uint32_t bin) const { add_one_at(smem_address(counts_) + bin * 4); }
    __device__ void add_many(uint32_t bin, int count) const { atomicAdd(counts_ + bin, count); }
    // The orders in both halves of a word, by their high bytes.
    __device__ void add_high_bytes(uint32_t word) const { add_two(__byte_perm(word, 0, 0x4341)); }
    // The same by their low bytes, of orders with the high byte of `known`, whose low byte is 0.
    __device__ void add_low_bytes(uint32_t word, uint32_t known) const {
        add_two(__vminu2(word ^ known * 0x10001, kBins * 0x10001));
    }
    // The same, and in the histogram behind this one the orders that match `other`, but not `known`.
    __device__ void add_low_bytes(uint32_t word, uint32_t known, uint32_t other) const {
        const uint32_t here = __vminu2(word ^ known * 0x10001, kBins * 0x10001),
                       there = __vminu2(word ^ other * 0x10001, kBins * 0x10001);
        add_two(__vminu2(here, there) + (here >> 8 & 0x10001) * kWords);
    }
    // `bin` here, or else bin_of_other in the histogram behind this one.
    __device__ void add(uint32_t bin, uint32_t bin_of_other) const {
        add(min(bin, bin_of_other) + (bin < kBins ? 0 : kWords));
    }

private:
    // A bin in each half.
    __device__ void add_two(uint32_t bins) const {
        const uint32_t to = smem_address(counts_);
        add_one_at(to + (bins & 0xffff) * 4);
        add_one_at(to + (bins >> 16) * 4);
    }
    __device__ static void add_one_at(uint32_t to) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(to) : "memory"); }

    uint32_t* const counts_;
};

// The largest digit such that at least `wanted` keys have it or a larger one, and how many have a larger one. If there
// are fewer keys, the digit is -1. totals: keys of each digit, aligned to 16 bytes. A warp calls.
struct ChosenDigit {
    int digit, above;
};
__device__ __forceinline__ ChosenDigit choose_largest_digit(const uint32_t* totals, int wanted) {
    constexpr int kBinsOfLane = kBins / 32;
    const int first = (31 - lane_id()) * kBinsOfLane;  // lane 0 has the highest
    int bins[kBinsOfLane], of_lane = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfLane; i += 4)
        *reinterpret_cast<int4*>(bins + i) = *reinterpret_cast<const int4*>(totals + first + i);
#pragma unroll
    for (const int keys : bins) of_lane += keys;
    const int upto = warp_inclusive_sum(of_lane);
    int above = upto - of_lane, bin = first;
#pragma unroll
    for (int i = kBinsOfLane - 1; i > 0; --i) {
        if (bin == first && above + bins[i] >= wanted) bin = first + i;
        if (bin == first) above += bins[i];
    }
    const uint32_t lanes = __ballot_sync(~0u, upto >= wanted);
    const int lane = __ffs(lanes) - 1;
    const ChosenDigit chosen{__shfl_sync(~0u, bin, lane), __shfl_sync(~0u, above, lane)};
    return lanes == 0 ? ChosenDigit{-1, 0} : chosen;
}

// Order-preserving integers of neighbouring biases (order_of), packed as in memory.
template <DataType kType>
struct alignas(16) Group {
    using Bits = typename FloatBits<kType>::Bits;
    static constexpr int kPerWord = 4 / sizeof(Bits);
    static constexpr int kWords = kGroup / kPerWord;

    uint32_t words[kWords];

    // Converts biases. `nans`: the running maximum of a word, or of either half, which a NaN turns into NaN.
    __device__ void to_orders(uint32_t& nans) {
#pragma unroll
        for (uint32_t& word : words) {
            propagate_nan(word, nans);
            if constexpr (kPerWord == 2) {
                add_zero(word);
                uint32_t negative;  // all bits of a half, or none
                asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(word));
                word ^= negative | 0x80008000;
            } else {
                word = order_of<kType>(word);
            }
        }
    }
    // Masks the biases from number `first` on, which may be negative.
    __device__ void mask_from(int first) {
        constexpr uint32_t kLowest = FloatBits<kType>::kLowest;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (kPerWord == 2) {
                if (first <= 2 * i) words[i] = kLowest * 0x10001;
                if (first == 2 * i + 1) words[i] = (words[i] & 0xffff) | kLowest << 16;
            } else {
                if (first <= i) words[i] = kLowest;
            }
        }
    }
    // Gives all masked keys the order kMaskedOrder.
    __device__ void clamp_masked() {
        constexpr uint32_t kMasked = kMaskedOrder<kType>;
#pragma unroll
        for (uint32_t& word : words) word = kPerWord == 2 ? __vmaxu2(word, kMasked * 0x10001) : max(word, kMasked);
    }
    __device__ static bool has_nan(uint32_t nans) {
        if constexpr (kPerWord == 2) return is_nan<kType>(nans & 0xffff) || is_nan<kType>(nans >> 16);
        return is_nan<kType>(nans);
    }
    __device__ static void propagate_nan(uint32_t word, uint32_t& nans) {
        if constexpr (kType == DataType::kFloat16) {
            asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(nans) : "r"(word));
        } else if constexpr (kType == DataType::kBFloat16) {
            asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(nans) : "r"(word));
        } else {
            asm("max.NaN.f32 %0, %0, %1;" : "+r"(nans) : "r"(word));
        }
    }
    // Turns -0 into 0.
    __device__ static void add_zero(uint32_t& word) {
        if constexpr (kType == DataType::kFloat16) {
            asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(0x3c003c00), "r"(0));
        } else {
            asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(word) : "r"(0x3f803f80), "r"(0));
        }
    }

    // Counts the digit at bit kShift of each order that matches `known` above it. `known` is 0 at that digit and below.
    template <int kShift>
    __device__ void count(const DigitHistogram& histogram, uint32_t known) const {
#pragma unroll
        for (const uint32_t word : words) {
            if constexpr (kPerWord == 1) {
                histogram.add(min((word ^ known) >> kShift, uint32_t{kBins}));
            } else if constexpr (kShift == 0) {
                histogram.add_low_bytes(word, known);
            } else {
                histogram.add_high_bytes(word);
            }
        }
    }

    // Counts in `histogram` the orders that match `known`, and in the one behind it the others that match `other`.
    template <int kShift>
    __device__ void count(const DigitHistogram& histogram, uint32_t known, uint32_t other) const {
#pragma unroll
        for (const uint32_t word : words) {
            if constexpr (kPerWord == 1) {
                constexpr uint32_t kNone = kBins;
                histogram.add(min((word ^ known) >> kShift, kNone), min((word ^ other) >> kShift, kNone));
            } else if constexpr (kShift == 0) {
                histogram.add_low_bytes(word, known, other);
            } else {
                histogram.add_high_bytes(word);
            }
        }
    }

    struct KeyBits {
        uint32_t above = 0, equal = 0;  // bit i: order i is above the limit, equal to it
    };
    // The limit is not 0.
    __device__ KeyBits compare(uint32_t limit) const {
        if constexpr (kPerWord == 2) {
            const uint32_t below = (limit - 1) * 0x10001;
            uint32_t found = 0;  // two bits for an order, of the low halves and of the high halves: 1 equal, 2 above
#pragma unroll
            for (int i = 0; i < kWords; ++i) found |= __vminu2(__vmaxu2(words[i], below) - below, 0x20002) << 2 * i;
            const auto interleave = [](uint32_t bits) { return (bits & 0x55) | (bits >> 15 & 0xaa); };
            return {interleave(found >> 1), interleave(found)};
        }
        KeyBits bits;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            bits.above |= words[i] > limit ? 1u << i : 0;
            bits.equal |= words[i] == limit ? 1u << i : 0;
        }
        return bits;
    }
};

}  // namespace flash_dmattn::cuda
