// dQ, and the gradient of a dense bias that batch elements share.
//
// A block owns 64 query rows. Two warp groups multiply, of all rows, each by half of the keys: the gradients of these biases
// stay in their registers while they go over the batch elements. The first warp group loads: its first warp by the copy
// engine, its second what comes with rows and keys.
#pragma once

#include "copy_rows.cuh"
#include "pair_rows.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

// kKeyTiles: tiles of 64 keys of a group.
template <typename T_, int kKeyTiles_>
struct PairDqueryTile {
    using T = T_;
    static constexpr int kGroups = 2, kKeyTiles = kKeyTiles_, kAllKeyTiles = kGroups * kKeyTiles, kStages = 3;
    static constexpr int kThreads = (1 + kGroups) * 128;
    static constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;
    using RowsTile = SmemTile<T, kPairRows, kPairHeadDim>;
    using KeysTile = SmemTile<T, 64, kPairHeadDim>;
};

template <typename Tile>
struct PairDquerySmem {
    using T = typename Tile::T;
    // Of one batch element.
    struct Stage {
        typename Tile::RowsTile query, dout;
        typename Tile::KeysTile key[Tile::kAllKeyTiles], value[Tile::kAllKeyTiles];
    };
    // What comes with it.
    struct Info {
        PairVisits visits;
        PairRowInfo rows;
        uint32_t columns[Tile::kAllKeyTiles][2];  // keys that are visible
    };

    alignas(kTileAlign) Stage stages[Tile::kStages];
    alignas(kTileAlign) PairBiasTile<T> bias[Tile::kAllKeyTiles];
    float4 dquery[kPairHeadDim / 8][128];  // of one group, for the other to add
    Info infos[Tile::kStages];
    RingBarriers<Tile::kStages> ring;
    alignas(8) uint64_t cleared[Tile::kStages];  // completes when what comes with a stage is there
    alignas(8) uint64_t bias_full;

    // By one thread.
    __device__ void init_rings() {
        constexpr int kConsumerWarps = Tile::kGroups * 4;
        ring.init(1, kConsumerWarps);
        mbarrier_init(smem_address(&bias_full), 1);
        for (auto& barrier : cleared) mbarrier_init(smem_address(&barrier), 1);
    }
};

// Where blocks leave their sums of the bias's gradient: [splits, biases, heads,
// row tiles, key tiles, 64 x 64 as registers hold it].
template <typename Tile>
__device__ __forceinline__ float* pair_dbias_part(const BwdArgs& p, int64_t split, int64_t tile, int key_tile) {
    return p.dbias_parts + ((split * p.dbias_tiles + tile) * Tile::kAllKeyTiles + key_tile) * kPairDbiasTile;
}

template <typename Tile>
class PairDqueryLoader {
public:
    using Smem = PairDquerySmem<Tile>;
    using T = typename Tile::T;

    __device__ PairDqueryLoader(const BwdArgs& p, const PairBwdMaps& maps, Smem& smem, const PairBlock& block)
        : p_(p), maps_(maps), smem_(smem), block_(block), ring_(smem.ring) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > 1) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch, ring_.advance()) {
            const PairKeys<64> keys(p_, batch, block_.head);
            if (warp == 1) {
                tell(Sequence(p_, batch), keys);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), keys.visits);
            }
        }
    }

private:
    __device__ void load_bias() {
        const int head = shared_head(block_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_expecting(full, sizeof(smem_.bias));
        for (int tile = 0; tile < Tile::kAllKeyTiles; ++tile)
            copy_box(smem_address(&smem_.bias[tile]), &maps_.bias, full, tile * 64, block_.tile * kPairRows, head,
                     block_.bias_batch);
    }
    __device__ void load(const Sequence& s, const PairVisits& visits) {
        const int row = block_.tile * kPairRows;
        ring_.wait_empty();
        auto& stage = smem_.stages[ring_.stage()];
        smem_.infos[ring_.stage()].visits = visits;
        mbarrier_arrive_expecting(ring_.full(), 2 * sizeof(typename Tile::RowsTile) +
                                                    2 * __popc(visits.visited) * sizeof(typename Tile::KeysTile));
        copy_rows(stage.query, maps_.query, ring_.full(), p_, s, row, block_.head);
        copy_rows(stage.dout, maps_.dout, ring_.full(), p_, s, row, block_.head);
        const int head = shared_head(block_.head, p_.heads, p_.kv_heads);
        for (uint32_t left = visits.visited; left != 0; left &= left - 1) {
            const int tile = __ffs(left) - 1;
            copy_rows(stage.key[tile], maps_.key, ring_.full(), p_, s, tile * 64, head);
            copy_rows(stage.value[tile], maps_.value, ring_.full(), p_, s, tile * 64, head);
        }
    }

    __device__ void tell(const Sequence& s, const PairKeys<64>& keys) {
        const PairRowStats stats(p_, s, block_.head, block_.tile * kPairRows);
        ring_.wait_full();
        auto& stage = smem_.stages[ring_.stage()];
        auto& info = smem_.infos[ring_.stage()];
        stats.hand_over(info.rows, stage.query, stage.dout);
        for (uint32_t left = keys.visits.visited & ~keys.visits.full; left != 0; left &= left - 1) {
            const int tile = __ffs(left) - 1;
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const uint32_t columns = keys.columns(tile, w);
                if (lane_id() == 0) info.columns[tile][w] = columns;
                if (columns >> lane_id() & 1) continue;
                clear_row(stage.key[tile], w * 32 + lane_id());
                clear_row(stage.value[tile], w * 32 + lane_id());
            }
        }
        fence_async();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive_here(smem_address(&smem_.cleared[ring_.stage()]));
    }

    const BwdArgs& p_;
    const PairBwdMaps& maps_;
    Smem& smem_;
    const PairBlock& block_;
    Ring<Tile::kStages> ring_;
};

template <typename Tile>
class PairDqueryConsumer {
public:
    using Smem = PairDquerySmem<Tile>;
    using T = typename Tile::T;

    __device__ PairDqueryConsumer(const BwdArgs& p, const PairSchedule& schedule, Smem& smem, const PairBlock& block)
        : p_(p), schedule_(schedule), smem_(smem), block_(block), group_(static_cast<int>(threadIdx.x) / 128 - 1),
          warp_row_(warp_id() % 4 * 16), ring_(smem.ring) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) dbias_[t][n][i] = 0;
    }

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            ring_.wait_full();
            mbarrier_wait(smem_address(&smem_.cleared[ring_.stage()]), ring_.phase());
            sum(smem_.infos[ring_.stage()].visits);
            ring_.release();
            ring_.advance();
            store_dquery(Sequence(p_, batch), batch % 2);
        }
        store_dbias();
    }

private:
    static constexpr int kKeyTiles = Tile::kKeyTiles, kTiles = 64 / 8, kDimTiles = kPairHeadDim / 8;
    using RowsTile = typename Tile::RowsTile;
    using KeysTile = typename Tile::KeysTile;
    using BiasTile = PairBiasTile<T>;
    using Pairs = float[1][kTiles][4];
    using DimSum = float[1][kDimTiles][4];
    using Packed = uint32_t[64 / 16][4];

    // The group's first tile of keys.
    __device__ int first_tile() const { return group_ * kKeyTiles; }

    __device__ __forceinline__ void sum(const PairVisits visits) {
        const auto& stage = smem_.stages[ring_.stage()];
        const auto& info = smem_.infos[ring_.stage()];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dquery_[0][n][i] = 0;
        float lse[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            lse[h] = info.rows.lse[warp_row_ + h * 8 + fragment_row()];
            delta[h] = info.rows.delta[warp_row_ + h * 8 + fragment_row()];
        }
        Packed dscores;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const int tile = first_tile() + t;
            if (!(visits.visited >> tile & 1)) continue;
            Pairs scores, dprobs;
            issue_scores(scores, stage.query, stage.key[tile]);
            issue_scores(dprobs, stage.dout, stage.value[tile]);
            wgmma_wait<0>();
            kept_in_flight(scores);
            kept_in_flight(dprobs);
            kept_in_flight(dquery_);
            if (visits.full >> tile & 1) {
                differentiate<false>(scores, dprobs, lse, delta, smem_.bias[tile], info.columns[tile]);
            } else {
                differentiate<true>(scores, dprobs, lse, delta, smem_.bias[tile], info.columns[tile]);
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) dbias_[t][n][i] += dprobs[0][n][i];
            to_operand<T>(dprobs, dscores);
            issue_dquery(dscores, stage.key[tile]);
        }
        wgmma_wait<0>();
        kept_in_flight(dquery_);
    }

    // S = Q K^T, or dP = dO V^T.
    static __device__ __forceinline__ void issue_scores(Pairs& pairs, const RowsTile& rows, const KeysTile& keys) {
        const Operand<RowsTile> a(rows);
        const Operand<KeysTile> b(keys);
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairHeadDim; d += 16)
            Wgmma<64>::template multiply<T, false, false>(pairs, a.across(d), b.across(d), d > 0);
        wgmma_commit();
    }
    // dQ += dS K.
    __device__ __forceinline__ void issue_dquery(const Packed& dscores, const KeysTile& keys) {
        const Operand<KeysTile> b(keys);
        kept_in_flight(dquery_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 64; k += 16)
            Wgmma<kPairHeadDim>::template multiply<T, true>(dquery_, dscores[k / 16], b.down(k), true);
        wgmma_commit();
    }

    // S and dP to P and dS, 0 where a mask hides the key.
    template <bool kMasked>
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, const float (&lse)[2], const float (&delta)[2],
                                                  const BiasTile& bias, const uint32_t (&columns)[2]) const {
        const float scale_log2 = schedule_.scale * kLog2E;
        const uint32_t at = bias.lane_down() + warp_row_ * BiasTile::kPanelCols * sizeof(T);
        uint32_t visible[2] = {~0u, ~0u};
        if (kMasked) visible[0] = columns[0] >> fragment_col(), visible[1] = columns[1] >> fragment_col();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            BiasTile::load_a(dense, at, 0, n * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                const int h = i % 2, m = n + i / 2;
                const float2 b = unpack<T>(dense[i]);
                const float shift[2] = {fmaf(b.x, kLog2E, -lse[h]), fmaf(b.y, kLog2E, -lse[h])};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool is_visible = !kMasked || visible[m / 4] & (1u << (m % 4 * 8 + e));
                    differentiate_pair<false>(s[0][m][2 * h + e], dp[0][m][2 * h + e], shift[e], delta[h], scale_log2, 0,
                                              is_visible);
                }
            }
        }
    }

    // The groups take turns: one leaves its part of dQ to the other, which stores the sum.
    __device__ __forceinline__ void store_dquery(const Sequence& s, int turn) {
        const int thread = static_cast<int>(threadIdx.x) % 128;
        if (group_ != turn) {
#pragma unroll
            for (int n = 0; n < kDimTiles; ++n) {
                const float* x = dquery_[0][n];
                smem_.dquery[n][thread] = {x[0], x[1], x[2], x[3]};
            }
            barrier_arrive(1 + turn, 256);
            return;
        }
        barrier_sync(1 + turn, 256);
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            const float4 x = smem_.dquery[n][thread];
            dquery_[0][n][0] += x.x, dquery_[0][n][1] += x.y, dquery_[0][n][2] += x.z, dquery_[0][n][3] += x.w;
        }
        T* to = static_cast<T*>(p_.dquery.data) + query_offset(p_.dquery, s, block_.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = block_.tile * kPairRows + warp_row_ + h * 8 + fragment_row();
            store_row(dquery_, h, static_cast<float>(p_.softmax_scale), to + row * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim), row < s.rows);
        }
    }

    __device__ __forceinline__ void store_dbias() const {
        if (p_.dbias_parts == nullptr) return;
        const int64_t head = block_.bias_batch * p_.heads + block_.head;
        const int64_t tile = head * schedule_.tiles + block_.tile;
        float* to = pair_dbias_part<Tile>(p_, block_.split, tile, first_tile());
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const float* x = dbias_[t][n];
                reinterpret_cast<float4*>(to)[(t * kTiles + n) * 128 + threadIdx.x % 128] = {x[0], x[1], x[2], x[3]};
            }
    }

    const BwdArgs& p_;
    const PairSchedule& schedule_;
    Smem& smem_;
    const PairBlock& block_;
    const int group_;
    const int warp_row_;  // this warp's first row of the block's
    Ring<Tile::kStages> ring_;
    DimSum dquery_;
    float dbias_[kKeyTiles][kTiles][4];
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    pair_dquery_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairSchedule schedule,
                       const __grid_constant__ PairBwdMaps maps) {
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairDquerySmem<Tile>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_rings();
    __syncthreads();
    const PairBlock block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        give_registers<Tile::kLoaderRegisters>();
        PairDqueryLoader<Tile>(p, maps, smem, block).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        PairDqueryConsumer<Tile>(p, schedule, smem, block).run();
    }
}

// The parts of the bias's gradient to rows of its dtype. A block of 128 threads adds up one tile of 64 x 64.
template <typename Tile>
__global__ void __launch_bounds__(128) pair_dbias_kernel(const __grid_constant__ BwdArgs p) {
    using T = typename Tile::T;
    constexpr int kTiles = 64 / 8;
    const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), kPairRows);
    const int key_tile = blockIdx.x % Tile::kAllKeyTiles, tile = blockIdx.x / Tile::kAllKeyTiles;
    if (key_tile * 64 >= p.seqlen_k) return;
    float sum[1][kTiles][4] = {};
    for (int split = 0; split < p.dbias_splits; ++split) {
        const float* from = pair_dbias_part<Tile>(p, split, tile, key_tile);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 x = reinterpret_cast<const float4*>(from)[n * 128 + threadIdx.x];
            sum[0][n][0] += x.x, sum[0][n][1] += x.y, sum[0][n][2] += x.z, sum[0][n][3] += x.w;
        }
    }
    const int64_t head = tile / row_tiles % p.heads, bias_batch = tile / row_tiles / p.heads;
    T* to = static_cast<T*>(p.dbias.data) + bias_batch * p.dbias.batch_stride + head * p.dbias.head_stride + key_tile * 64;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int64_t row = tile % row_tiles * kPairRows + warp_id() * 16 + h * 8 + fragment_row();
        store_row(sum, h, 1, to + row * p.dbias.row_stride, static_cast<int>(p.seqlen_k) - key_tile * 64, row < p.seqlen_q);
    }
}

}  // namespace flash_dmattn::cuda::sm90
