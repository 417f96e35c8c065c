// DSMEM reduction of dbias over the batch elements that share a dense bias. The CTAs of one (head, n_block), one per
// batch element, form a cluster and visit the same m_blocks. Each CTA owns a part of every dx tile, receives the
// others' values in its shared memory and stores the sum.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "kernel_traits.h"
#include "cuda/sm80/warp_gemm.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits>
struct DsmemReductionSharedStorage {
    static constexpr int kFragments = Traits::kScoreM * Traits::kScoreN;  // 16x8 fragments of a warp's part of a tile
    // [rank][owned fragment]; a thread receives the values of the same thread in the other CTAs.
    alignas(128) float4 parts[kFragments][Traits::kThreads];
    uint64_t ready, received;  // mbarriers: all CTAs can receive; all parts owned here have arrived
};

template <typename Traits>
class DsmemReduction {
public:
    using SharedStorage = DsmemReductionSharedStorage<Traits>;

    // Whether each CTA of the group owns whole pairs of neighbouring fragments.
    static bool can_divide(int64_t group_size) {
        return group_size == 2 ? kCanDivideBy<2> : group_size == 4 && kCanDivideBy<4>;
    }

    __device__ DsmemReduction(const SmemAddress& address_of, const SharedStorage& smem, int group_size)
        : parts_(address_of(smem.parts)), ready_(address_of(smem.ready)), received_(address_of(smem.received)),
          group_size_(group_size) {}

    // All threads of the cluster call begin() first and end() last.
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            mbarrier_init(ready_, group_size_);
            mbarrier_init(received_, 1);
        }
        cluster_sync();
    }
    __device__ __forceinline__ void end() const { cluster_sync(); }

    // Tells the cluster that this CTA can receive the next tile: all its threads have returned from reduce().
    __device__ __forceinline__ void arrive_ready() const {
        if (threadIdx.x < group_size_) mbarrier_arrive_cluster(map_to_cta(ready_, threadIdx.x));
    }

    // Sends fragments of the columns from first_n on. `phase` is the parity of the tile's number.
    template <int kN>
    __device__ __forceinline__ void send(const float (&dx)[Traits::kScoreM][kN][4], int first_n, int rank,
                                         int phase) const {
        mbarrier_wait(ready_, phase);
        if constexpr (kCanDivideBy<4>) {
            if (group_size_ == 4) return send_among<4>(dx, first_n, rank);
        }
        if constexpr (kCanDivideBy<2>) send_among<2>(dx, first_n, rank);
    }

    // CTA `rank` owns the fragments, row-major, from first_fragment(rank) on. Calls consume(i, a, b) with the sums of
    // its fragments i and i + 1, for even i.
    __device__ __forceinline__ int first_fragment(int rank) const {
        return rank * (SharedStorage::kFragments / group_size_);
    }
    template <typename Consume>
    __device__ __forceinline__ void reduce(int phase, const Consume& consume) const {
        mbarrier_wait(received_, phase);
        if constexpr (kCanDivideBy<4>) {
            if (group_size_ == 4) return reduce_among<4>(consume);
        }
        if constexpr (kCanDivideBy<2>) reduce_among<2>(consume);
    }

private:
    static constexpr int kFragmentBytes = Traits::kThreads * 16;
    template <int kGroupSize>
    static constexpr bool kCanDivideBy = SharedStorage::kFragments % (2 * kGroupSize) == 0;

    template <int kGroupSize, int kN>
    __device__ __forceinline__ void send_among(const float (&dx)[Traits::kScoreM][kN][4], int first_n, int rank) const {
        constexpr int kOwned = SharedStorage::kFragments / kGroupSize;
        if (first_n == 0 && threadIdx.x == 0)
            mbarrier_arrive_and_expect_tx(received_, kOwned * (kGroupSize - 1) * kFragmentBytes);
        const uint32_t to = parts_ + rank * kOwned * kFragmentBytes + threadIdx.x * 16;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const int fragment = m * Traits::kScoreN + first_n + n, owner = fragment / kOwned;
                const uint32_t here = to + fragment % kOwned * kFragmentBytes;
                store_smem_or_dsmem(here, map_to_cta(here, owner), map_to_cta(received_, owner), owner == rank,
                                    dx[m][n]);
            }
    }

    template <int kGroupSize, typename Consume>
    __device__ __forceinline__ void reduce_among(const Consume& consume) const {
        constexpr int kOwned = SharedStorage::kFragments / kGroupSize;
        const uint32_t parts = parts_ + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < kOwned; i += 2) {
            float dx[2][4];
#pragma unroll
            for (int from = 0; from < kGroupSize; ++from)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float x[4];
                    load_shared(x, parts + (from * kOwned + i + j) * kFragmentBytes);
#pragma unroll
                    for (int e = 0; e < 4; ++e) dx[j][e] = from == 0 ? x[e] : dx[j][e] + x[e];
                }
            consume(i, dx[0], dx[1]);
        }
    }

    uint32_t parts_, ready_, received_;
    int group_size_;
};

}  // namespace flash_dmattn::cuda::sm80
