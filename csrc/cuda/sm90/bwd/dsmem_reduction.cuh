// The gradient of a dense bias that batch elements share: the CTAs of a cluster, one for each of them, reduce dS
// through DSMEM.
//
// Each CTA owns a part of the rows of an m_block. It receives these rows in float32 from the other CTAs, adds its own
// and stores the sum.
#pragma once

#include "cuda/arch/cluster.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "kernel_traits.h"
#include "cuda/arch/smem_descriptor.cuh"

namespace flash_dmattn::cuda::sm90 {

struct NoReduction {
    NoReduction() = default;
    __device__ NoReduction(NoReduction&, int, int, int) {}
};

template <typename Traits>
struct DsmemReductionSharedStorage {
    static constexpr int kFragments = Traits::kRows / 8;

    // In accumulator order: [warpgroup][source CTA, fragment of the owned rows][thread].
    float4 parts[Traits::kConsumerWarpgroups][kFragments][128];
    alignas(kSmemTileAlign) SmemTile<typename Traits::T, Traits::kRows / 2, Traits::kKeys> sums;
    alignas(8) uint64_t full[Traits::kConsumerWarpgroups];   // the other CTAs' parts have arrived
    alignas(8) uint64_t empty[Traits::kConsumerWarpgroups];  // every CTA has read its parts

    // One thread calls.
    __device__ void init(int cluster_size) {
        for (int warpgroup = 0; warpgroup < Traits::kConsumerWarpgroups; ++warpgroup) {
            mbarrier_init(smem_address(&full[warpgroup]), 1);
            mbarrier_init(smem_address(&empty[warpgroup]), cluster_size * 4);
        }
    }
};

// Whether the CTAs can split an m_block's rows, and whether shared memory has room for the parts.
constexpr bool can_cluster_reduce_among(int64_t cluster_size) { return cluster_size == 2 || cluster_size == 4; }
constexpr bool can_cluster_reduce_at(int head_dim) { return head_dim <= 128; }

// One MMA warpgroup's part of the reduction.
template <typename Traits>
class DsmemReduction {
public:
    using SharedStorage = DsmemReductionSharedStorage<Traits>;
    static constexpr int kFragments = SharedStorage::kFragments;
    using ScoresFragment = float[1][kFragments][4];
    static_assert(kFragments % 8 == 0, "each of 4 CTAs owns pairs of fragments");

    __device__ DsmemReduction(SharedStorage& smem, int warpgroup, int cta_rank, int cluster_size)
        : smem_(smem), warpgroup_(warpgroup), thread_(static_cast<int>(threadIdx.x) % 128), cta_rank_(cta_rank),
          cluster_size_(cluster_size) {}

    // Sends each CTA the rows that it owns.
    __device__ __forceinline__ void send(const ScoresFragment& dscores) const {
        cluster_size_ == 2 ? send_among<2>(dscores) : send_among<4>(dscores);
    }

    // Adds the parts of the owned rows and rounds them to smem.sums. warp_key: the warp's first key of the n_block.
    template <typename T>
    __device__ __forceinline__ void sum(int warp_key) {
        mbarrier_wait(smem_address(&smem_.full[warpgroup_]), phase_);
        cluster_size_ == 2 ? sum_among<2, T>(warp_key) : sum_among<4, T>(warp_key);
        __syncwarp();
        if (lane_id() < cluster_size_)
            mbarrier_arrive_cluster(map_to_cta(smem_address(&smem_.empty[warpgroup_]), lane_id()));
        phase_ ^= 1;
    }

    // The warpgroup's keys of smem.sums, and the first owned row of the m_block.
    __device__ uint32_t sums() const { return smem_address(smem_.sums.data + warpgroup_ * (Traits::kRows / 2) * 64); }
    __device__ int first_row() const { return Traits::kRows / cluster_size_ * cta_rank_; }

private:
    template <int kClusterSize>
    __device__ __forceinline__ void send_among(const ScoresFragment& dscores) const {
        constexpr int kOwned = kFragments / kClusterSize, kFragmentBytes = 128 * sizeof(float4);
        mbarrier_wait(smem_address(&smem_.empty[warpgroup_]), phase_ ^ 1);
        const uint32_t full = smem_address(&smem_.full[warpgroup_]);
        if (thread_ == 0) mbarrier_arrive_and_expect_tx(full, (kClusterSize - 1) * kOwned * kFragmentBytes);
        const uint32_t here = smem_address(&smem_.parts[warpgroup_][cta_rank_ * kOwned][thread_]);
#pragma unroll
        for (int owner = 0; owner < kClusterSize; ++owner) {
            const uint32_t there = map_to_cta(here, owner), full_there = map_to_cta(full, owner);
#pragma unroll
            for (int n = 0; n < kOwned; ++n)
                store_smem_or_dsmem(here + n * kFragmentBytes, there + n * kFragmentBytes, full_there,
                                    owner == cta_rank_, dscores[0][owner * kOwned + n]);
        }
    }

    template <int kClusterSize, typename T>
    __device__ __forceinline__ void sum_among(int warp_key) {
        using SumsTile = decltype(smem_.sums);
        constexpr int kOwned = kFragments / kClusterSize;
        const auto& parts = smem_.parts[warpgroup_];
        const int lane = lane_id();
#pragma unroll
        for (int n = 0; n < kOwned; n += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float4 sum = parts[n + m][thread_];
#pragma unroll
                for (int source = 1; source < kClusterSize; ++source) {
                    const float4 x = parts[source * kOwned + n + m][thread_];
                    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
                }
                packed[2 * m] = pack<T>(sum.x, sum.y);
                packed[2 * m + 1] = pack<T>(sum.z, sum.w);
            }
            const int offset = SumsTile::offset(n * 8 + lane % 8 + lane / 16 * 8, warp_key / 8 + lane / 8 % 2);
            stmatrix_x4_trans(smem_address(smem_.sums.data + offset), packed);
        }
    }

    SharedStorage& smem_;
    const int warpgroup_, thread_, cta_rank_, cluster_size_;
    int phase_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
