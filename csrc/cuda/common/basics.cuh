// What every kernel is written with: the half-precision types, and who a thread is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_dmattn::cuda {

using half_t = __half;
using bfloat16_t = __nv_bfloat16;

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.4426950408889634f;

template <typename T>
constexpr __host__ __device__ T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Whether tiles of `fewer` rows (or keys) serve so many better than tiles of `more`, of which more than a tenth would
// be none.
constexpr bool fewer_fit_better(int64_t count, int64_t fewer, int64_t more) {
    return ceil_div(count, fewer) * fewer * 10 < ceil_div(count, more) * more * 9;
}

// A number to divide by again and again, of at most 31 bits as the dividends: two or three instructions instead of some
// twenty. From Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
struct FastDivmod {
    uint32_t value = 1, multiplier = 0, shift = 0;

    FastDivmod() = default;
    explicit FastDivmod(int64_t divisor) : value(static_cast<uint32_t>(divisor)) {
        if (value == 1) return;
        while ((int64_t{1} << shift) < divisor) ++shift;
        --shift;
        multiplier = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + value - 1) / value);  // below 2^32
    }
    __device__ __forceinline__ uint32_t quotient(uint32_t x) const {
        return value == 1 ? x : __umulhi(x, multiplier) >> shift;
    }
};

// An index over several dimensions together, to be taken apart: first the one in which neighbours differ.
template <typename Index>
struct FlatIndex {
    Index rest;  // over the dimensions that have not been taken

    __device__ explicit FlatIndex(Index index) : rest(index) {}
    __device__ __forceinline__ int take(int64_t count) {
        const Index place = rest % static_cast<Index>(count);
        rest /= static_cast<Index>(count);
        return static_cast<int>(place);
    }
    __device__ __forceinline__ int take(const FastDivmod& count) {
        const Index quotient = count.quotient(rest), place = rest - quotient * count.value;
        rest = quotient;
        return static_cast<int>(place);
    }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A value of which the compiler does not see where it comes from: so it neither computes it again and again, nor what
// depends on it long before it is needed, to hold it in registers or to spill it.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// A value that is the same in all lanes, of which the compiler then knows that: what depends on it is computed once a
// warp.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Two numbers in one register, the first in its low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<T, half_t>) {
        const __half2 pair = __floats2half2_rn(low, high);
        packed = reinterpret_cast<const uint32_t&>(pair);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        packed = reinterpret_cast<const uint32_t&>(pair);
    }
    return packed;
}
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
    if constexpr (std::is_same_v<T, half_t>) {
        return __half22float2(reinterpret_cast<const __half2&>(packed));
    } else {
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    }
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half_t x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16_t x) { return __bfloat162float(x); }

}  // namespace flash_dmattn::cuda
