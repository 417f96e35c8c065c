// How batch elements that share a dense bias sum its gradient where dx is made. The blocks of one head and tile of keys,
// one a batch element, form a cluster and visit the same tiles of rows. Of every tile each block owns a part: the others
// send it theirs, to its shared memory, and it writes the sum. Nothing is computed twice.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "kernel_traits.h"
#include "cuda/sm80/warp_gemm.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits>
struct DxExchangeSharedStorage {
    static constexpr int kBlocks = Traits::kScoreM * Traits::kScoreN;  // of 16 x 8 pairs, of a warp's part of a tile
    // [batch element][block of the part that is owned here]; a thread receives what the same threads elsewhere hold.
    alignas(128) float4 parts[kBlocks][Traits::kThreads];
    uint64_t ready, received;  // barriers: every owner awaits the tile's parts; the parts owned here have come
};

template <typename Traits>
class DsmemReduction {
public:
    using SharedStorage = DxExchangeSharedStorage<Traits>;

    // Whether so many batch elements can each own whole pairs of neighbouring blocks.
    static bool can_divide(int64_t sharers) { return sharers == 2 ? kCanDivideBy<2> : sharers == 4 && kCanDivideBy<4>; }

    __device__ DsmemReduction(const SmemAddress& address_of, const SharedStorage& smem, int sharers)
        : parts_(address_of(smem.parts)),
          ready_(address_of(smem.ready)),
          received_(address_of(smem.received)),
          sharers_(sharers) {}

    // Before and after all else, by all threads of the cluster.
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            mbarrier_init(ready_, sharers_);
            mbarrier_init(received_, 1);
        }
        cluster_sync();
    }
    __device__ __forceinline__ void end() const { cluster_sync(); }

    // For every tile, once all threads have called sum() for the tile before: its parts may be sent.
    __device__ __forceinline__ void await_parts() const {
        if (threadIdx.x < sharers_) mbarrier_arrive_cluster(map_to_cta(ready_, threadIdx.x));
    }

    // Columns of blocks of the tile, from first_n on, by block `rank`. `phase` is 0 for the first tile that is visited, 1 for
    // the next, and so on in turn.
    template <int kN>
    __device__ __forceinline__ void send(const float (&dx)[Traits::kScoreM][kN][4], int first_n, int rank,
                                         int phase) const {
        mbarrier_wait(ready_, phase);
        if constexpr (kCanDivideBy<4>) {
            if (sharers_ == 4) return send_among<4>(dx, first_n, rank);
        }
        if constexpr (kCanDivideBy<2>) send_among<2>(dx, first_n, rank);
    }

    // Of the blocks in the order of rows, `rank` owns those from first_block(rank) on. visit(i, a, b) is given the sums of
    // the blocks i and i + 1 of them, for even i.
    __device__ __forceinline__ int first_block(int rank) const { return rank * (SharedStorage::kBlocks / sharers_); }
    template <typename Visit>
    __device__ __forceinline__ void sum(int phase, const Visit& visit) const {
        mbarrier_wait(received_, phase);
        if constexpr (kCanDivideBy<4>) {
            if (sharers_ == 4) return sum_among<4>(visit);
        }
        if constexpr (kCanDivideBy<2>) sum_among<2>(visit);
    }

private:
    static constexpr int kBlockBytes = Traits::kThreads * 16;
    template <int kSharers>
    static constexpr bool kCanDivideBy = SharedStorage::kBlocks % (2 * kSharers) == 0;

    template <int kSharers, int kN>
    __device__ __forceinline__ void send_among(const float (&dx)[Traits::kScoreM][kN][4], int first_n, int rank) const {
        constexpr int kOwned = SharedStorage::kBlocks / kSharers;
        if (first_n == 0 && threadIdx.x == 0)
            mbarrier_arrive_and_expect_tx(received_, kOwned * (kSharers - 1) * kBlockBytes);
        const uint32_t to = parts_ + rank * kOwned * kBlockBytes + threadIdx.x * 16;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kN; ++n) {
                const int block = m * Traits::kScoreN + first_n + n, owner = block / kOwned;
                const uint32_t here = to + block % kOwned * kBlockBytes;
                store_smem_or_dsmem(here, map_to_cta(here, owner), map_to_cta(received_, owner), owner == rank,
                                    dx[m][n]);
            }
    }

    template <int kSharers, typename Visit>
    __device__ __forceinline__ void sum_among(const Visit& visit) const {
        constexpr int kOwned = SharedStorage::kBlocks / kSharers;
        const uint32_t parts = parts_ + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < kOwned; i += 2) {
            float dx[2][4];
#pragma unroll
            for (int from = 0; from < kSharers; ++from)
#pragma unroll
                for (int block = 0; block < 2; ++block) {
                    float x[4];
                    load_shared(x, parts + (from * kOwned + i + block) * kBlockBytes);
#pragma unroll
                    for (int e = 0; e < 4; ++e) dx[block][e] = from == 0 ? x[e] : dx[block][e] + x[e];
                }
            visit(i, dx[0], dx[1]);
        }
    }

    uint32_t parts_, ready_, received_;
    int sharers_;
};

}  // namespace flash_dmattn::cuda::sm80
