// The instructions of compute capability 8.0 that the kernels are made of, and the half-precision types they work on.
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

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A value of which the compiler does not see where it comes from: so it neither computes it again and again, nor what
// depends on it long before it is needed, to hold it in registers or to spill it.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint32_t load_shared_u16(uint32_t from) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ void load_shared(float (&x)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}

// Copies `bytes` (0 to 16) from global to shared memory and fills the rest of the 16 with zeros; where bytes is 0,
// `from` is not read. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same, all or nothing.
__device__ __forceinline__ void cp_async_16_if(uint32_t to, const void* from, bool copied) {
    asm volatile(
        "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, ignored;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<uint32_t>(copied))
        : "memory");
}
template <int kBytes>  // 4, 8 or 16
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// to[0] += x, and to[1] += y and so on, in global memory; `to` is aligned to all its numbers together. atomicAdd asks
// which memory a pointer leads to where the compiler does not see it.
__device__ __forceinline__ void reduce_add(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}
__device__ __forceinline__ void reduce_add(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
    reduce_add(to, x);
    reduce_add(to + 1, y);
#endif
}
__device__ __forceinline__ void reduce_add(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
#else
    reduce_add(to, x[0], x[1]);
    reduce_add(to + 2, x[2], x[3]);
#endif
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8, and receives of every
// matrix the elements (i / 4, 2 * (i % 4) + {0, 1}); of the transposed form, those of the transposed matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// c += a b, of 16x16, 16x8 and 16x8 elements. Lane i holds of c the rows i / 4 (c[0], c[1]) and i / 4 + 8 (c[2],
// c[3]), the columns 2 * (i % 4) + {0, 1}; a is four and b two 8x8 matrices as ldmatrix gives them: of a in the order
// top left, bottom left, top right, bottom right; of b, stored as 8 columns of 16, its first and its last 8 rows.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, half_t>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

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

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// tanh within a few units of 1e-7 of the right value, where the hardware's own is off by 5e-4.
__device__ __forceinline__ float fast_tanh(float x) {
    // 1 - 2 / (e^2x + 1): both ends saturate to 1 and -1.
    return 1.f - __fdividef(2.f, fast_exp2(x * (2 * kLog2E)) + 1.f);
}

}  // namespace flash_dmattn::cuda
