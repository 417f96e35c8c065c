// Loads, stores and reductions whose PTX form differs from what the compiler emits.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Whether the code being compiled may use instructions of compute capability 9.0. They do not assemble for older
// targets, so callers test this at compile time.
#ifdef __CUDA_ARCH__
constexpr bool kHasSm90 = __CUDA_ARCH__ >= 900;
#else
constexpr bool kHasSm90 = true;
#endif

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

// One 16-byte load through L2, where it stands: the compiler may delay a plain load to its first use.
__device__ __forceinline__ uint4 load_global_16(const void* from) {
    uint4 x;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

// Starts to bring memory to L2. Address and size are multiples of 16. Compute capability 9.0 and up.
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// One 16-byte store. The compiler may split an assignment into four.
__device__ __forceinline__ void store_global_16(void* to, const uint32_t (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// *to += x in global memory, without a return value. atomicAdd tests the address space where the compiler does not know
// it.
__device__ __forceinline__ void reduce_add(unsigned long long* to, unsigned long long x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}
__device__ __forceinline__ void reduce_add(float* to, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// to[i] += x[i] in global memory. `to` is aligned to all elements together.
__device__ __forceinline__ void reduce_add_x2(float* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void reduce_add_x4(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

__device__ __forceinline__ int32_t load_acquire(const int32_t* from) {
    int32_t x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_release(int32_t* to, int32_t x) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

}  // namespace flash_dmattn::cuda
