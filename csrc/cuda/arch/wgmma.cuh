// wgmma: asynchronous matrix multiply-accumulate of a warpgroup. Compute capability 9.0 only (compute_90a).
//
// A warpgroup is four warps, the first a multiple of four. One instruction computes d += a b with d 64 x kN, a 64 x 16
// and b 16 x kN. Warp w holds rows 16 w to 16 w + 15 of d, and of an a in registers, in the layout of fragment.cuh.
#pragma once

namespace flash_dmattn::cuda {

// Changes the registers per thread of this warpgroup (setmaxnreg); all its threads call.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders register accesses before the next wgmma that uses the registers.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of the wgmmas issued since the last commit.
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the newest kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to an accumulator of a wgmma in flight across this point.
template <int kFragments>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[1][kFragments][4]) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[0][n][i])::"memory");
}

// d += a b, or d = a b unless `accumulate`. b is a shared-memory descriptor, a a descriptor or registers. kMnMajor: an
// operand is contiguous along M or N instead of K.
template <int kN>
struct Wgmma;

#define FLASH_DMATTN_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_DMATTN_REGISTERS_32 \
    FLASH_DMATTN_REGISTERS_16     \
    ", "                          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_DMATTN_REGISTERS_40 \
    FLASH_DMATTN_REGISTERS_32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_DMATTN_REGISTERS_48 \
    FLASH_DMATTN_REGISTERS_32     \
    ", "                          \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_DMATTN_REGISTERS_64 \
    FLASH_DMATTN_REGISTERS_48     \
    ", "                          \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_DMATTN_REGISTERS_96                                                      \
    FLASH_DMATTN_REGISTERS_64                                                          \
    ", "                                                                               \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_DMATTN_REGISTERS_128                                                                 \
    FLASH_DMATTN_REGISTERS_96                                                                      \
    ", "                                                                                           \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_DMATTN_ACC_4(n) "+f"(d[0][n][0]), "+f"(d[0][n][1]), "+f"(d[0][n][2]), "+f"(d[0][n][3])
#define FLASH_DMATTN_ACC_16(n) \
    FLASH_DMATTN_ACC_4(n), FLASH_DMATTN_ACC_4(n + 1), FLASH_DMATTN_ACC_4(n + 2), FLASH_DMATTN_ACC_4(n + 3)
#define FLASH_DMATTN_ACC_32(n) FLASH_DMATTN_ACC_16(n), FLASH_DMATTN_ACC_16(n + 4)
#define FLASH_DMATTN_ACC_40(n) FLASH_DMATTN_ACC_32(n), FLASH_DMATTN_ACC_4(n + 8), FLASH_DMATTN_ACC_4(n + 9)
#define FLASH_DMATTN_ACC_48(n) FLASH_DMATTN_ACC_32(n), FLASH_DMATTN_ACC_16(n + 8)
#define FLASH_DMATTN_ACC_64(n) FLASH_DMATTN_ACC_48(n), FLASH_DMATTN_ACC_16(n + 12)
#define FLASH_DMATTN_ACC_96(n) FLASH_DMATTN_ACC_64(n), FLASH_DMATTN_ACC_16(n + 16), FLASH_DMATTN_ACC_16(n + 20)
#define FLASH_DMATTN_ACC_128(n) FLASH_DMATTN_ACC_96(n), FLASH_DMATTN_ACC_16(n + 24), FLASH_DMATTN_ACC_16(n + 28)

#define FLASH_DMATTN_WGMMA_ASM(N, DTYPE, REGISTERS, A, B, ACCUMULATE, MN_MAJOR)                       \
    "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #ACCUMULATE                                \
    ", 0;\n"                                                                                          \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." DTYPE "." DTYPE " {" REGISTERS "}, " A ", %" #B \
    ", accumulate, 1, 1, " MN_MAJOR ";\n}"

// i0, i1, ..: operand numbers after those of d.
#define FLASH_DMATTN_WGMMA(N, REGISTERS, D, i0, i1, i2, i3, i4, i5, i6)                                               \
    template <>                                                                                                       \
    struct Wgmma<N> {                                                                                                 \
        using Accumulator = float[1][N / 8][4];                                                                       \
                                                                                                                      \
        template <typename T, bool kMnMajorA, bool kMnMajorB>                                                         \
        static __device__ __forceinline__ void multiply(Accumulator& d, uint64_t a, uint64_t b, bool accumulate) {    \
            if constexpr (std::is_same_v<T, half_t>) {                                                                \
                asm volatile(FLASH_DMATTN_WGMMA_ASM(N, "f16", REGISTERS, "%" #i0, i1, i2, "%" #i3 ", %" #i4)          \
                             : D                                                                                      \
                             : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMnMajorA)),   \
                               "n"(static_cast<int>(kMnMajorB)));                                                     \
            } else {                                                                                                  \
                asm volatile(FLASH_DMATTN_WGMMA_ASM(N, "bf16", REGISTERS, "%" #i0, i1, i2, "%" #i3 ", %" #i4)         \
                             : D                                                                                      \
                             : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMnMajorA)),   \
                               "n"(static_cast<int>(kMnMajorB)));                                                     \
            }                                                                                                         \
        }                                                                                                             \
        template <typename T, bool kMnMajorB>                                                                         \
        static __device__ __forceinline__ void multiply(Accumulator& d, const uint32_t (&a)[4], uint64_t b,           \
                                                        bool accumulate) {                                            \
            constexpr int kMnMajor = kMnMajorB;                                                                       \
            if constexpr (std::is_same_v<T, half_t>) {                                                                \
                asm volatile(FLASH_DMATTN_WGMMA_ASM(N, "f16", REGISTERS, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}",  \
                                                    i4, i5, "%" #i6)                                                  \
                             : D                                                                                      \
                             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
                               "n"(kMnMajor));                                                                        \
            } else {                                                                                                  \
                asm volatile(FLASH_DMATTN_WGMMA_ASM(N, "bf16", REGISTERS, "{%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}", \
                                                    i4, i5, "%" #i6)                                                  \
                             : D                                                                                      \
                             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
                               "n"(kMnMajor));                                                                        \
            }                                                                                                         \
        }                                                                                                             \
    };

FLASH_DMATTN_WGMMA(32, FLASH_DMATTN_REGISTERS_16, FLASH_DMATTN_ACC_16(0), 16, 17, 18, 19, 20, 21, 22)
FLASH_DMATTN_WGMMA(64, FLASH_DMATTN_REGISTERS_32, FLASH_DMATTN_ACC_32(0), 32, 33, 34, 35, 36, 37, 38)
FLASH_DMATTN_WGMMA(80, FLASH_DMATTN_REGISTERS_40, FLASH_DMATTN_ACC_40(0), 40, 41, 42, 43, 44, 45, 46)
FLASH_DMATTN_WGMMA(96, FLASH_DMATTN_REGISTERS_48, FLASH_DMATTN_ACC_48(0), 48, 49, 50, 51, 52, 53, 54)
FLASH_DMATTN_WGMMA(128, FLASH_DMATTN_REGISTERS_64, FLASH_DMATTN_ACC_64(0), 64, 65, 66, 67, 68, 69, 70)
FLASH_DMATTN_WGMMA(192, FLASH_DMATTN_REGISTERS_96, FLASH_DMATTN_ACC_96(0), 96, 97, 98, 99, 100, 101, 102)
FLASH_DMATTN_WGMMA(256, FLASH_DMATTN_REGISTERS_128, FLASH_DMATTN_ACC_128(0), 128, 129, 130, 131, 132, 133, 134)

#undef FLASH_DMATTN_WGMMA
#undef FLASH_DMATTN_WGMMA_ASM
#undef FLASH_DMATTN_ACC_128
#undef FLASH_DMATTN_ACC_96
#undef FLASH_DMATTN_ACC_64
#undef FLASH_DMATTN_ACC_48
#undef FLASH_DMATTN_ACC_40
#undef FLASH_DMATTN_ACC_32
#undef FLASH_DMATTN_ACC_16
#undef FLASH_DMATTN_ACC_4
#undef FLASH_DMATTN_REGISTERS_128
#undef FLASH_DMATTN_REGISTERS_96
#undef FLASH_DMATTN_REGISTERS_64
#undef FLASH_DMATTN_REGISTERS_48
#undef FLASH_DMATTN_REGISTERS_40
#undef FLASH_DMATTN_REGISTERS_32
#undef FLASH_DMATTN_REGISTERS_16

}  // namespace flash_dmattn::cuda
