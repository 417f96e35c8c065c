// mbarriers in shared memory, and the fence between the generic and the async proxy. Compute capability 9.0 and up.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// A phase completes after `arrivals` arrivals and after all bytes that they expect. Waiters pass the parity of the
// phase that they wait for; the first phase has parity 0.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier),
                 "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_and_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Adds to the bytes that the current phase expects.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, int arrivals = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives once this thread's earlier cp.async copies have completed. The barrier counts it like any other arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of any CTA of the cluster; the address comes from map_to_cta.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// The time hint lets the hardware suspend the warp. Without it a waiting warp polls: about 120 times per step in the
// producer of the backward.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int phase) {
    constexpr int kSuspendNanoseconds = 10'000'000;
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
        "@!done bra AGAIN;\n}" ::"r"(barrier),
        "r"(phase), "n"(kSuspendNanoseconds)
        : "memory");
}

// Orders this thread's generic-proxy accesses to shared memory before later async-proxy accesses (TMA, wgmma) that
// other threads start after a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace flash_dmattn::cuda
