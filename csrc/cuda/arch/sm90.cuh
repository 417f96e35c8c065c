// The instructions of compute capability 9.0. In code for an earlier one a call of any of them does not assemble:
// callers ask kHasSm90 at compile time.
#pragma once

#include "sm80.cuh"

namespace flash_dmattn::cuda {

// Whether the code that is being compiled is for a device that has them.
#ifdef __CUDA_ARCH__
constexpr bool kHasSm90 = __CUDA_ARCH__ >= 900;
#else
constexpr bool kHasSm90 = true;
#endif

// to[0] += x[0], to[1] += x[1] and so on, in global memory; `to` is aligned to all its numbers together.
__device__ __forceinline__ void reduce_add_x2(float* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void reduce_add_x4(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

// Four 8x8 matrices of 16-bit elements to shared memory: the reverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t to, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Clusters of blocks, each of which reaches the others' shared memory.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// An address in shared memory, as it is in block `rank` of the cluster.
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

// A barrier in shared memory that completes a phase after so many arrivals and after the bytes that these announced.
// Whoever waits knows whether the phase is even (0), as the first is, or odd (1).
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier),
                 "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_and_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// More bytes of the current phase.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Once what this thread has begun to copy by cp.async has come. The barrier counts it as any other arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// At a barrier of any block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Writes to shared memory: of this block, at `here`, where it is_here, else of another block of the cluster, at `there`, and
// there, once the bytes have come, tells the barrier so. Addresses of another block are map_to_cta's.
__device__ __forceinline__ void store_smem_or_dsmem(uint32_t here, uint32_t there, uint32_t barrier_there, bool is_here,
                                                      const float (&x)[4]) {
    asm volatile(
        "{\n.reg .pred here;\nsetp.ne.u32 here, %6, 0;\n"
        "@here st.shared.v4.f32 [%7], {%1, %2, %3, %4};\n"
        "@!here st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];\n}" ::"r"(there),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier_there), "r"(static_cast<uint32_t>(is_here)), "r"(here)
        : "memory");
}

// Between what the threads have read and written in shared memory and what reads and writes it asynchronously: copies and
// products. A barrier follows.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same in global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Copies a box of a tensor in global memory to shared memory, where zeros stand for what lies outside the tensor, and
// tells the barrier of the bytes. `map` is a CUtensorMap among the kernel's parameters; x counts along its first
// dimension, in which elements are contiguous.
__device__ __forceinline__ void tma_load_4d(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// The reverse; what lies outside the tensor is left out. The thread commits, and waits before the memory is written again.
__device__ __forceinline__ void tma_store_4d(const void* map, uint32_t from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
// Adds floats in shared memory to those in global memory; addresses and bytes are multiples of 16. Committed and awaited in
// the same way.
__device__ __forceinline__ void tma_reduce_add(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the newest kPending groups of this thread have been read from shared memory.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void tma_store_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_dmattn::cuda
