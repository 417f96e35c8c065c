// Clusters of blocks, of compute capability 9.0: each block reaches the others' shared memory. Elsewhere a block is a
// cluster of its own, and what only several blocks need does nothing.
#pragma once

#include "ptx.cuh"

namespace flash_dmattn::cuda {

__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int>(size);
#else
    return 1;
#endif
}
__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// An address in shared memory, as it is in block `rank` of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, int rank) {
#if __CUDA_ARCH__ >= 900
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
#else
    return address;
#endif
}

// A barrier in shared memory that completes a phase after so many arrivals and after the bytes that these announced.
// Whoever waits knows whether the phase is even (0), as the first is, or odd (1).
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier),
                 "r"(arrivals)
                 : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// At a barrier of any block of the cluster.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier_in_block) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_in_block) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
#endif
}

// Writes to shared memory of any block of the cluster and, once they are there, 16 bytes' completion to the barrier, which
// lies in the same block.
__device__ __forceinline__ void store_async(uint32_t to_in_block, const float (&x)[4], uint32_t barrier_in_block) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to_in_block),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier_in_block)
        : "memory");
#endif
}

}  // namespace flash_dmattn::cuda
