// mma.sync, ldmatrix and stmatrix: the warp-level tensor core instructions.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Which dimension of a GEMM's operand is contiguous in memory: K, along which it sums, or M (of A) and N (of B).
enum class Major { kK, kMN };

// Loads four 8x8 matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8 and receives
// elements (i / 4, 2 * (i % 4) + {0, 1}) of each matrix. The _trans form loads the transposed matrices.
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

// Transposes an 8x8 matrix of 16-bit elements in ldmatrix's layout.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
    return transposed;
}

// Stores four 8x8 matrices: the inverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// c += a b with c 16x8, a 16x16 and b 16x8. Lane i holds rows i / 4 (c[0], c[1]) and i / 4 + 8 (c[2], c[3]) and columns
// 2 * (i % 4) + {0, 1} of c. a is four and b two 8x8 matrices in ldmatrix's layout: a in the order top left, bottom
// left, top right, bottom right; b, stored as 8 columns of 16, as its first and last 8 rows.
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

}  // namespace flash_dmattn::cuda
