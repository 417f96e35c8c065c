// Half-precision types, thread indices and integer helpers of all kernels.
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
constexpr int kWarpgroupThreads = 128;  // four warps, which issue a wgmma together

template <typename T>
constexpr __host__ __device__ T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Quotients by powers of 2 that are known at run time only, as shifts.
__host__ __device__ inline int log2_of(int power) {
#ifdef __CUDA_ARCH__
    return __ffs(power) - 1;
#else
    int log2 = 0;
    while (1 << log2 < power) ++log2;
    return log2;
#endif
}
__host__ __device__ inline int div_by_power(int a, int power) { return a >> log2_of(power); }
__host__ __device__ inline int ceil_div_by_power(int a, int power) { return (a + power - 1) >> log2_of(power); }

// Calls run(std::integral_constant<int, lanes>()): so many lanes, a power of 2, have 8 elements each of a row.
template <typename Run>
void with_lanes_per_row(int64_t head_dim, const Run& run) {
    if (head_dim <= 32) return run(std::integral_constant<int, 4>());
    if (head_dim <= 64) return run(std::integral_constant<int, 8>());
    if (head_dim <= 128) return run(std::integral_constant<int, 16>());
    run(std::integral_constant<int, 32>());
}

// Whether blocks of `fewer` rows (or keys) waste less than blocks of `more`, by over a tenth.
constexpr bool fewer_fit_better(int64_t count, int64_t fewer, int64_t more) {
    return ceil_div(count, fewer) * fewer * 10 < ceil_div(count, more) * more * 9;
}

// Division by an invariant divisor: two or three instructions instead of about twenty. Divisor and dividends have at
// most 31 bits. From Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
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

// Unflattens an index over several dimensions, from the innermost dimension to the outermost.
template <typename Index>
struct FlatIndex {
    Index rest;  // flat index over the remaining dimensions

    __device__ explicit FlatIndex(Index flat) : rest(flat) {}
    // Removes the innermost dimension, of `count` elements, and returns the index in it.
    __device__ __forceinline__ int pop(int64_t count) {
        const Index index = rest % static_cast<Index>(count);
        rest /= static_cast<Index>(count);
        return static_cast<int>(index);
    }
    __device__ __forceinline__ int pop(const FastDivmod& count) {
        const Index quotient = count.quotient(rest), index = rest - quotient * count.value;
        rest = quotient;
        return static_cast<int>(index);
    }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
// The same, read from its register again: the compiler keeps nothing that depends on it through a loop.
__device__ __forceinline__ int reread_lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// The sum of x over the lanes of a warp up to this one.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T other = __shfl_up_sync(~0u, x, step);
        if (lane_id() >= step) x += other;
    }
    return x;
}

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides a value's origin from the compiler, which then neither recomputes the value, nor computes what depends on it
// long before it is needed and holds that in registers.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Tells the compiler that a value is the same in all lanes, so that it uses uniform registers for what depends on it.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Two half-precision numbers in one register.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<T, half_t>) {
        const __half2 halves = __floats2half2_rn(low, high);
        packed = reinterpret_cast<const uint32_t&>(halves);
    } else {
        const __nv_bfloat162 halves = __floats2bfloat162_rn(low, high);
        packed = reinterpret_cast<const uint32_t&>(halves);
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
