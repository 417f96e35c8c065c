// TMA (cp.async.bulk): tensor tiles between global and shared memory. Compute capability 9.0 and up.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// True in one lane of the warp, always the same one. All lanes call. After a test of lane_id() ptxas would put each TMA
// instruction into a loop over the active lanes.
__device__ __forceinline__ bool elect_one_sync() {
    uint32_t is_elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_elected));
    return is_elected;
}

// TMA load of a box from global to shared memory. Elements outside the tensor become zeros; `barrier` counts the bytes.
// `map` is a CUtensorMap kernel parameter (__grid_constant__); x counts along the contiguous dimension.
__device__ __forceinline__ void tma_load_4d(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z,
                                            int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// TMA store of a box; elements outside the tensor are not written. The caller commits, and waits before it reuses
// `from`.
__device__ __forceinline__ void tma_store_4d(const void* map, uint32_t from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Adds a box to global memory, in the map's dtype. Elements outside the tensor are not written. Committed and awaited
// like a TMA store.
__device__ __forceinline__ void tma_reduce_add_4d(const void* map, uint32_t from, int x, int y, int z, int w) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            map),
        "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Adds `bytes` of floats in shared memory to global memory. Addresses and bytes are multiples of 16. Committed and
// awaited like a TMA store.
__device__ __forceinline__ void tma_reduce_add(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until shared memory has been read for all but the newest kPending of this thread's groups.
template <int kPending = 0>
__device__ __forceinline__ void tma_store_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all groups of this thread are complete.
__device__ __forceinline__ void tma_store_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_dmattn::cuda
