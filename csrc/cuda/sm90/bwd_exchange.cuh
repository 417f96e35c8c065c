// The gradient of a dense bias that batch elements share: their blocks, a cluster, exchange dx tile by tile.
//
// Of every tile of pairs each block is given a part of the rows by all others, in float32, adds its own and stores the sum.
#pragma once

#include "../ptx/sm90.cuh"
#include "bwd_config.h"
#include "operand.cuh"

namespace flash_dmattn::cuda::sm90 {

struct NoExchange {
    NoExchange() = default;
    __device__ NoExchange(NoExchange&, int, int, int) {}
};

template <typename Tile>
struct BwdExchangeSmem {
    static constexpr int kTiles = Tile::kRows / 8;

    float4 parts[Tile::kConsumers][kTiles][128];  // as accumulators hold them, from one block after the other
    alignas(kTileAlign) SmemTile<typename Tile::T, Tile::kRows / 2, Tile::kKeys> sums;
    alignas(8) uint64_t full[Tile::kConsumers];
    alignas(8) uint64_t empty[Tile::kConsumers];  // everywhere, the part that this block writes

    // By one thread.
    __device__ void init(int blocks) {
        for (int group = 0; group < Tile::kConsumers; ++group) {
            mbarrier_init(smem_address(&full[group]), 1);
            mbarrier_init(smem_address(&empty[group]), blocks * 4);
        }
    }
};

// Whether so many blocks can part the rows of a tile among them, and whether shared memory has room for the parts.
constexpr bool can_exchange_among(int64_t blocks) { return blocks == 2 || blocks == 4; }
constexpr bool can_exchange_at(int head_dim) { return head_dim <= 128; }

// A warp group's side of it.
template <typename Tile>
class BwdExchange {
public:
    using Smem = BwdExchangeSmem<Tile>;
    static constexpr int kTiles = Smem::kTiles, kTilesShift = kTiles == 8 ? 3 : 4;
    static_assert(kTiles == 1 << kTilesShift);
    using Pairs = float[1][kTiles][4];

    __device__ BwdExchange(Smem& smem, int group, int rank, int blocks)
        : smem_(smem), group_(group), thread_(static_cast<int>(threadIdx.x) % 128), rank_(rank), blocks_(blocks),
          part_shift_(blocks == 2 ? kTilesShift - 1 : kTilesShift - 2) {}

    __device__ int part() const { return 1 << part_shift_; }  // tiles of 8 rows of a block

    // Sends everybody their parts; this block's own stays here.
    __device__ __forceinline__ void send(const Pairs& dx) const {
        mbarrier_wait(smem_address(&smem_.empty[group_]), phase_ ^ 1);
        const uint32_t full = smem_address(&smem_.full[group_]);
        if (thread_ == 0) mbarrier_arrive_expecting(full, (blocks_ - 1) * part() * 128 * static_cast<int>(sizeof(float4)));
        constexpr int kBlockBytes = 128 * sizeof(float4);  // of 8 rows
        const uint32_t to = smem_address(&smem_.parts[group_][rank_ << part_shift_][thread_]);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const int owner = n >> part_shift_;
            store_shared_or_async(to + (n & (part() - 1)) * kBlockBytes, full, owner, owner == rank_, dx[0][n]);
        }
    }

    // Adds up the parts that are this block's to smem.sums, rounded; warp_key: this warp's first key of the block's.
    template <typename T>
    __device__ __forceinline__ void receive(int warp_key) {
        using Sums = decltype(smem_.sums);
        mbarrier_wait(smem_address(&smem_.full[group_]), phase_);
        const int lane = lane_id();
        for (int n = 0; n < part(); n += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float4 sum = {};
                for (int source = 0; source < blocks_; ++source) {
                    const float4 x = smem_.parts[group_][(source << part_shift_) + n + m][thread_];
                    sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
                }
                packed[2 * m] = pack<T>(sum.x, sum.y);
                packed[2 * m + 1] = pack<T>(sum.z, sum.w);
            }
            const int at = Sums::offset(n * 8 + lane % 8 + lane / 16 * 8, warp_key / 8 + lane / 8 % 2);
            stmatrix_x4_trans(smem_address(smem_.sums.data + at), packed);
        }
        __syncwarp();
        if (lane < blocks_) mbarrier_arrive(in_block(smem_address(&smem_.empty[group_]), lane));
        phase_ ^= 1;
    }

    // In shared memory, the group's keys of the sums, and their first row of the tile.
    __device__ uint32_t sums() const { return smem_address(smem_.sums.data + group_ * (Tile::kRows / 2) * 64); }
    __device__ int first_row() const { return (rank_ << part_shift_) * 8; }

private:
    Smem& smem_;
    const int group_, thread_, rank_, blocks_;
    const int part_shift_;
    int phase_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
