// cp.async: 16-byte copies from global to shared memory by single threads.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Copies `bytes` (0 to 16) from global to shared memory and fills the rest of the 16 bytes with zeros. With bytes == 0
// it does not read `from`. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies 16 bytes, or writes 16 bytes of zeros where `copied` is false. kEvictFirst: the line in L2 is the first to be
// evicted.
template <bool kEvictFirst = false>
__device__ __forceinline__ void cp_async_16_if(uint32_t to, const void* from, bool copied) {
    const auto is_copied = static_cast<uint32_t>(copied);
    if constexpr (kEvictFirst) {
        constexpr uint64_t kPolicy = 0x12f0000000000000;  // createpolicy.fractional.L2::evict_first, of all lines
        asm volatile(
            "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %2, 0;\n"
            "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, ignored, %3;\n}" ::"r"(to),
            "l"(from), "r"(is_copied), "l"(kPolicy)
            : "memory");
    } else {
        asm volatile(
            "{\n.reg .pred ignored;\nsetp.eq.u32 ignored, %2, 0;\n"
            "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n}" ::"r"(to),
            "l"(from), "r"(is_copied)
            : "memory");
    }
}

template <int kBytes>  // 4, 8 or 16
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_dmattn::cuda
