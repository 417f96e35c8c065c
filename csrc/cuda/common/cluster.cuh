// Clusters of blocks, of compute capability 9.0: each block reaches the others' shared memory. Elsewhere a block is a
// cluster of its own, and what only several blocks need does nothing.
#pragma once

#include "ptx.cuh"

namespace flash_dmattn::cuda {

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

// Writes to shared memory: of this block where `here`, else of block `rank` of the cluster, and there, once the bytes have
// come, tells the barrier so.
__device__ __forceinline__ void store_shared_or_async(uint32_t to, uint32_t barrier, int rank, bool here,
                                                      const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred here;\nsetp.ne.u32 here, %6, 0;\n"
        "@here st.shared.v4.f32 [%7], {%1, %2, %3, %4};\n"
        "@!here st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(
            in_block(to, rank)),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(in_block(barrier, rank)), "r"(static_cast<uint32_t>(here)),
        "r"(to)
        : "memory");
#endif
}

}  // namespace flash_dmattn::cuda
