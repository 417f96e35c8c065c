// The gradient of a dense bias that batch elements share: their blocks, a cluster, exchange dx tile by tile.
//
// Of every tile of pairs each block is given a part of the rows by all others, in float32, adds its own and stores the sum.
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
struct BwdExchangeSharedStorage {
    static constexpr int kTiles = Traits::kRows / 8;

    float4 parts[Traits::kConsumerWarpgroups][kTiles]
                [128];  // as accumulators hold them, from one block after the other
    alignas(kSmemTileAlign) SmemTile<typename Traits::T, Traits::kRows / 2, Traits::kKeys> sums;
    alignas(8) uint64_t full[Traits::kConsumerWarpgroups];
    alignas(8) uint64_t empty[Traits::kConsumerWarpgroups];  // everywhere, the part that this block writes

    // By one thread.
    __device__ void init(int blocks) {
        for (int group = 0; group < Traits::kConsumerWarpgroups; ++group) {
            mbarrier_init(smem_address(&full[group]), 1);
            mbarrier_init(smem_address(&empty[group]), blocks * 4);
        }
    }
};

// Whether so many blocks can part the rows of a tile among them, and whether shared memory has room for the parts.
constexpr bool can_cluster_reduce_among(int64_t blocks) { return blocks == 2 || blocks == 4; }
constexpr bool can_cluster_reduce_at(int head_dim) { return head_dim <= 128; }

// A warp group's side of it.
template <typename Traits>
class DsmemReduction {
public:
    using SharedStorage = BwdExchangeSharedStorage<Traits>;
    static constexpr int kTiles = SharedStorage::kTiles;
    using Pairs = float[1][kTiles][4];
    static_assert(kTiles % 8 == 0, "of 4 blocks each takes tiles by twos");

    __device__ DsmemReduction(SharedStorage& smem, int group, int rank, int blocks)
        : smem_(smem), warpgroup_(group), thread_(static_cast<int>(threadIdx.x) % 128), rank_(rank), blocks_(blocks) {}

    // Sends everybody their parts; this block's own stays here.
    __device__ __forceinline__ void send(const Pairs& dx) const {
        blocks_ == 2 ? send_among<2>(dx) : send_among<4>(dx);
    }

    // Adds up the parts that are this block's to smem.sums, rounded; warp_key: this warp's first key of the block's.
    template <typename T>
    __device__ __forceinline__ void receive(int warp_key) {
        mbarrier_wait(smem_address(&smem_.full[warpgroup_]), phase_);
        blocks_ == 2 ? add_of<2, T>(warp_key) : add_of<4, T>(warp_key);
        __syncwarp();
        if (lane_id() < blocks_) mbarrier_arrive_cluster(map_to_cta(smem_address(&smem_.empty[warpgroup_]), lane_id()));
        phase_ ^= 1;
    }

    // In shared memory, the group's keys of the sums, and their first row of the tile.
    __device__ uint32_t sums() const { return smem_address(smem_.sums.data + warpgroup_ * (Traits::kRows / 2) * 64); }
    __device__ int first_row() const { return Traits::kRows / blocks_ * rank_; }

private:
    template <int kBlocks>
    __device__ __forceinline__ void send_among(const Pairs& dx) const {
        constexpr int kPart = kTiles / kBlocks, kTileBytes = 128 * sizeof(float4);  // of 8 rows
        mbarrier_wait(smem_address(&smem_.empty[warpgroup_]), phase_ ^ 1);
        const uint32_t full = smem_address(&smem_.full[warpgroup_]);
        if (thread_ == 0) mbarrier_arrive_and_expect_tx(full, (kBlocks - 1) * kPart * kTileBytes);
        const uint32_t here = smem_address(&smem_.parts[warpgroup_][rank_ * kPart][thread_]);
#pragma unroll
        for (int owner = 0; owner < kBlocks; ++owner) {
            const uint32_t there = map_to_cta(here, owner), full_there = map_to_cta(full, owner);
#pragma unroll
            for (int n = 0; n < kPart; ++n)
                store_smem_or_dsmem(here + n * kTileBytes, there + n * kTileBytes, full_there, owner == rank_,
                                    dx[0][owner * kPart + n]);
        }
    }

    template <int kBlocks, typename T>
    __device__ __forceinline__ void add_of(int warp_key) {
        using Sums = decltype(smem_.sums);
        constexpr int kPart = kTiles / kBlocks;
        const auto& parts = smem_.parts[warpgroup_];
        const int lane = lane_id();
#pragma unroll
        for (int n = 0; n < kPart; n += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float4 sum = parts[n + m][thread_];
#pragma unroll
                for (int source = 1; source < kBlocks; ++source) {
                    const float4 x = parts[source * kPart + n + m][thread_];
                    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
                }
                packed[2 * m] = pack<T>(sum.x, sum.y);
                packed[2 * m + 1] = pack<T>(sum.z, sum.w);
            }
            const int at = Sums::offset(n * 8 + lane % 8 + lane / 16 * 8, warp_key / 8 + lane / 8 % 2);
            stmatrix_x4_trans(smem_address(smem_.sums.data + at), packed);
        }
    }

    SharedStorage& smem_;
    const int warpgroup_, thread_, rank_, blocks_;
    int phase_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
