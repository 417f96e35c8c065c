// One GEMM of a warpgroup: fences, the wgmma instructions along K, and the commit.
#pragma once

#include "smem_descriptor.cuh"
#include "wgmma.cuh"

namespace flash_dmattn::cuda {

// acc += A B, or acc = A B with kZeroInit. The wgmma group stays in flight: the caller waits for it, then fences acc.
// A is 64 x K, B is K x N with N = 8 kFragments, both from their descriptor's origin on; K is the tiles' whole extent.
template <bool kZeroInit, Major kMajorA, Major kMajorB, int kFragments, typename TileA, typename TileB>
__device__ __forceinline__ void gemm_ss(float (&acc)[1][kFragments][4], const SmemDescriptor<TileA>& a,
                                        const SmemDescriptor<TileB>& b) {
    constexpr int kK = SmemDescriptor<TileA>::template kExtentK<kMajorA>;
    static_assert(kK == SmemDescriptor<TileB>::template kExtentK<kMajorB>);
    warpgroup_fence_operand(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kK; k += 16)
        Wgmma<kFragments * 8>::template multiply<typename TileA::Element, kMajorA == Major::kMN, kMajorB == Major::kMN>(
            acc, a.template at_k<kMajorA>(k), b.template at_k<kMajorB>(k), !kZeroInit || k > 0);
    wgmma_commit_group();
}

// The same with A in registers, 16 columns in each of its fragments (to_a_operand).
template <bool kZeroInit, Major kMajorB, int kFragments, int kFragmentsA, typename TileB>
__device__ __forceinline__ void gemm_rs(float (&acc)[1][kFragments][4], const uint32_t (&a)[kFragmentsA][4],
                                        const SmemDescriptor<TileB>& b) {
    static_assert(kFragmentsA * 16 == SmemDescriptor<TileB>::template kExtentK<kMajorB>);
    warpgroup_fence_operand(acc);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kFragmentsA * 16; k += 16)
        Wgmma<kFragments * 8>::template multiply<typename TileB::Element, kMajorB == Major::kMN>(
            acc, a[k / 16], b.template at_k<kMajorB>(k), !kZeroInit || k > 0);
    wgmma_commit_group();
}

}  // namespace flash_dmattn::cuda
