// Thread block clusters and distributed shared memory (DSMEM). Compute capability 9.0 and up.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// A barrier of all threads of a cluster, in two halves: what a thread wrote before it arrived is seen after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// Without that order, which takes a fence of all memory. For barriers that were initialized by mbarrier_init, which has
// its own fence, and before a CTA exits whose shared memory others have read: they have used what they loaded.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// A barrier of all threads of a cluster of `ctas` CTAs that orders shared memory alone: what a thread wrote before to
// that of its own CTA is seen after it. The fence of cluster_sync also waits for global memory.
__device__ __forceinline__ void cluster_sync_shared(int ctas) {
    if (ctas > 1) {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
        asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
        cluster_arrive_relaxed();
#else
        cluster_arrive();
#endif
        cluster_wait();
    } else {
        __syncthreads();
    }
}

// Maps a shared-memory address of this CTA to the same address in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t address, int rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

__device__ __forceinline__ uint32_t load_dsmem(uint32_t dsmem_address) {
    uint32_t x;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(dsmem_address) : "memory");
    return x;
}

__device__ __forceinline__ uint32_t load_dsmem_u16(uint32_t dsmem_address) {
    uint16_t x;
    asm volatile("ld.shared::cluster.u16 %0, [%1];" : "=h"(x) : "r"(dsmem_address) : "memory");
    return x;
}

__device__ __forceinline__ float4 load_dsmem_float4(uint32_t dsmem_address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(dsmem_address)
                 : "memory");
    return x;
}

// Stores asynchronously to a CTA of the cluster, whose mbarrier counts the bytes. Both addresses come from map_to_cta.
__device__ __forceinline__ void store_dsmem_async(uint32_t dsmem_address, uint32_t x, uint32_t cluster_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(dsmem_address),
                 "r"(x), "r"(cluster_barrier)
                 : "memory");
}
__device__ __forceinline__ void store_dsmem_async(uint32_t dsmem_address, const uint4& x, uint32_t cluster_barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     dsmem_address),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(cluster_barrier)
                 : "memory");
}

// Stores 16 bytes to shared memory: to `here` in this CTA where is_here, else asynchronously to `there` in another CTA
// of the cluster, whose mbarrier `barrier_there` counts the bytes. Remote addresses come from map_to_cta.
__device__ __forceinline__ void store_smem_or_dsmem(uint32_t here, uint32_t there, uint32_t barrier_there, bool is_here,
                                                    const float (&x)[4]) {
    asm volatile(
        "{\n.reg .pred here;\nsetp.ne.u32 here, %6, 0;\n"
        "@here st.shared.v4.f32 [%7], {%1, %2, %3, %4};\n"
        "@!here st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(
            there),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier_there), "r"(static_cast<uint32_t>(is_here)), "r"(here)
        : "memory");
}

}  // namespace flash_dmattn::cuda
