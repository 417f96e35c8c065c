// dK and dV with a dense bias that batch elements share.
//
// A block owns 64 keys for each warp group that multiplies, and goes over all rows; scores stand transposed, keys by rows.
// The first warp group loads: its first warp by the copy engine, its second what comes with rows.
#pragma once

#include "copy_rows.cuh"
#include "pair_rows.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T_, int kGroups_>
struct PairDkeyTile {
    using T = T_;
    static constexpr int kGroups = kGroups_, kKeys = kGroups * 64, kRowStages = 3, kKeyStages = 2;
    static constexpr int kThreads = (1 + kGroups) * 128;
    static constexpr int kLoaderRegisters = kGroups == 2 ? 40 : 32, kConsumerRegisters = kGroups == 2 ? 232 : 160;
    using RowsTile = SmemTile<T, kPairRows, kPairHeadDim>;
    using KeysTile = SmemTile<T, kKeys, kPairHeadDim>;
};

template <typename Tile>
struct PairDkeySmem {
    using T = typename Tile::T;
    struct KeyInfo {
        uint32_t visited_rows;  // a bit for each tile of them
        uint32_t columns[Tile::kGroups * 2];  // keys that are visible
    };

    alignas(kTileAlign) typename Tile::KeysTile key[Tile::kKeyStages];
    alignas(kTileAlign) typename Tile::KeysTile value[Tile::kKeyStages];
    alignas(kTileAlign) typename Tile::RowsTile query[Tile::kRowStages];
    alignas(kTileAlign) typename Tile::RowsTile dout[Tile::kRowStages];
    PairRowInfo rows[Tile::kRowStages];
    KeyInfo keys[Tile::kKeyStages];
    RingBarriers<Tile::kKeyStages> key_ring;
    RingBarriers<Tile::kRowStages> row_ring;
    alignas(8) uint64_t cleared[Tile::kRowStages];  // completes when what comes with the rows of a stage is there
    alignas(8) uint64_t bias_full;
    alignas(kTileAlign) PairBiasTile<T> bias[1];    // [groups][bias_tiles]

    static size_t bytes(int bias_tiles) {
        return offsetof(PairDkeySmem, bias) + Tile::kGroups * bias_tiles * sizeof(PairBiasTile<T>);
    }
    // By one thread.
    __device__ void init_rings() {
        constexpr int kConsumerWarps = Tile::kGroups * 4;
        key_ring.init(1, kConsumerWarps);
        mbarrier_init(smem_address(&bias_full), 1);
        row_ring.init(1, kConsumerWarps);
        for (auto& barrier : cleared) mbarrier_init(smem_address(&barrier), 1);
    }
};

template <typename Tile>
class PairDkeyLoader {
public:
    using Smem = PairDkeySmem<Tile>;
    using T = typename Tile::T;

    __device__ PairDkeyLoader(const BwdArgs& p, const PairSchedule& schedule, const PairBwdMaps& maps, Smem& smem,
                              const PairBlock& block)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), block_(block), key_ring_(smem.key_ring),
          row_ring_(smem.row_ring) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > 1) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const PairKeys<64> keys(p_, batch, block_.head);
            typename Smem::KeyInfo info;
            uint32_t any = 0;
#pragma unroll
            for (int i = 0; i < Tile::kGroups * 2; ++i)
                any |= info.columns[i] = keys.columns(block_.tile * Tile::kGroups + i / 2, i % 2);
            info.visited_rows = any != 0 ? (1u << schedule_.bias_tiles) - 1 : 0;  // all, or none
            if (warp == 1) {
                tell_of_rows(Sequence(p_, batch), info.visited_rows);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), info);
            }
        }
    }

private:
    __device__ void load_bias() {
        const int tiles = schedule_.bias_tiles, head = shared_head(block_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_expecting(full, Tile::kGroups * tiles * static_cast<int>(sizeof(PairBiasTile<T>)));
        for (int i = 0; i < Tile::kGroups * tiles; ++i)
            copy_box(smem_address(&smem_.bias[i]), &maps_.bias, full, block_.tile * Tile::kKeys + i / tiles * 64,
                     i % tiles * kPairRows, head, block_.bias_batch);
    }
    __device__ void load(const Sequence& s, const typename Smem::KeyInfo& info) {
        const int key = block_.tile * Tile::kKeys, stage = key_ring_.stage();
        key_ring_.wait_empty();
        smem_.keys[stage] = info;
        mbarrier_arrive_expecting(key_ring_.full(), 2 * sizeof(typename Tile::KeysTile));
        copy_rows(smem_.key[stage], maps_.key, key_ring_.full(), p_, s, key, block_.head);
        copy_rows(smem_.value[stage], maps_.value, key_ring_.full(), p_, s, key, block_.head);
        key_ring_.advance();
        for (uint32_t left = info.visited_rows; left != 0; left &= left - 1, row_ring_.advance()) {
            const int row = (__ffs(left) - 1) * kPairRows;
            row_ring_.wait_empty();
            mbarrier_arrive_expecting(row_ring_.full(), 2 * sizeof(typename Tile::RowsTile));
            copy_rows(smem_.query[row_ring_.stage()], maps_.query, row_ring_.full(), p_, s, row, block_.head);
            copy_rows(smem_.dout[row_ring_.stage()], maps_.dout, row_ring_.full(), p_, s, row, block_.head);
        }
    }

    __device__ void tell_of_rows(const Sequence& s, uint32_t visited) {
        for (uint32_t left = visited; left != 0; left &= left - 1, row_ring_.advance()) {
            const PairRowStats stats(p_, p_.delta, s, block_.head, (__ffs(left) - 1) * kPairRows);
            row_ring_.wait_full();
            const int stage = row_ring_.stage();
            stats.clear_empty(smem_.query[stage], smem_.dout[stage]);
            smem_.rows[stage].twos[lane_id()] = {stats.lse[0], stats.lse[1], stats.delta[0], stats.delta[1]};
            fence_async();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive_here(smem_address(&smem_.cleared[stage]));
        }
    }

    const BwdArgs& p_;
    const PairSchedule& schedule_;
    const PairBwdMaps& maps_;
    Smem& smem_;
    const PairBlock& block_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kRowStages> row_ring_;
};

template <typename Tile>
class PairDkeyConsumer {
public:
    using Smem = PairDkeySmem<Tile>;
    using T = typename Tile::T;

    __device__ PairDkeyConsumer(const BwdArgs& p, const PairSchedule& schedule, Smem& smem, const PairBlock& block)
        : p_(p), schedule_(schedule), smem_(smem), block_(block),
          group_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)), warp_key_(warp_id() % 4 * 16),
          key_(block.tile * Tile::kKeys + group_ * 64 + warp_key_ + fragment_row()), dkey_rows_(first_row(p.dkey)),
          dvalue_rows_(first_row(p.dvalue)), bias_lane_(kept(bias_lane())), key_ring_(smem.key_ring),
          row_ring_(smem.row_ring), multiplied_ring_(smem.row_ring) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            key_ring_.wait_full();
            const auto& info = smem_.keys[key_ring_.stage()];
            sum(info.visited_rows);
            const uint32_t visible = info.columns[(group_ * 64 + warp_key_) / 32] >> (warp_key_ % 32 + fragment_row());
            key_ring_.release();
            key_ring_.advance();
            store(visible);
            dkey_rows_ += p_.dkey.batch_stride;
            dvalue_rows_ += p_.dvalue.batch_stride;
        }
    }

private:
    static constexpr int kTiles = kPairRows / 8, kDimTiles = kPairHeadDim / 8;
    using RowsTile = typename Tile::RowsTile;
    using KeysTile = typename Tile::KeysTile;
    using BiasTile = PairBiasTile<T>;
    using Pairs = float[1][kTiles][4];      // keys by rows
    using DimSum = float[1][kDimTiles][4];  // keys by columns
    using Packed = uint32_t[kPairRows / 16][4];

    __device__ T* first_row(const RowsView& view) const {
        return static_cast<T*>(view.data) + block_.begin * view.batch_stride + block_.head * view.head_stride +
               key_ * view.row_stride;
    }
    // Where this lane reads the group's biases: of 16 rows and this warp's 16 keys, transposed to what two neighbouring
    // tiles of the accumulator hold.
    __device__ uint32_t bias_lane() const {
        const int lane = lane_id();
        const BiasTile& bias = smem_.bias[group_ * schedule_.bias_tiles];
        return bias.address(lane % 8 + lane / 16 * 8, warp_key_ / 8 + lane / 8 % 2);
    }

    __device__ __forceinline__ void sum(uint32_t visited) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dkey_[0][n][i] = dvalue_[0][n][i] = 0;
        Pairs scores, dprobs;
        Packed probs, dscores;
        const int key_stage = key_ring_.stage();
        const Operand<KeysTile> key(smem_.key[key_stage], group_ * 64), value(smem_.value[key_stage], group_ * 64);
        for (uint32_t left = visited; left != 0; left &= left - 1) {
            const int stage = row_ring_.stage();
            row_ring_.wait_full();
            mbarrier_wait(smem_address(&smem_.cleared[stage]), row_ring_.phase());
            const Operand<RowsTile> query(smem_.query[stage]), dout(smem_.dout[stage]);
            issue_scores(scores, key, query);
            issue_scores(dprobs, value, dout);
            wgmma_wait<0>();
            kept_in_flight(scores);
            kept_in_flight(dprobs);
            kept_in_flight(dkey_);
            kept_in_flight(dvalue_);
            if (left != visited) release_rows();
            differentiate(scores, dprobs, smem_.rows[stage],
                          bias_lane_ + (__ffs(left) - 1) * static_cast<uint32_t>(sizeof(BiasTile)));
            to_operand<T>(scores, probs);
            to_operand<T>(dprobs, dscores);
            issue_sum(dvalue_, probs, dout);
            issue_sum(dkey_, dscores, query);
            row_ring_.advance();
        }
        wgmma_wait<0>();
        kept_in_flight(dkey_);
        kept_in_flight(dvalue_);
        if (visited != 0) release_rows();
    }
    __device__ __forceinline__ void release_rows() {
        multiplied_ring_.release();
        multiplied_ring_.advance();
    }

    // S = K Q^T, or dP = V dO^T.
    static __device__ __forceinline__ void issue_scores(Pairs& pairs, const Operand<KeysTile>& keys,
                                                        const Operand<RowsTile>& rows) {
        kept_in_flight(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairHeadDim; d += 16)
            Wgmma<kPairRows>::template multiply<T, false, false>(pairs, keys.across(d), rows.across(d), d > 0);
        wgmma_commit();
    }
    // dV += P dO, or dK += dS Q.
    static __device__ __forceinline__ void issue_sum(DimSum& sum, const Packed& pairs, const Operand<RowsTile>& rows) {
        kept_in_flight(sum);
        wgmma_fence();
#pragma unroll
        for (int r = 0; r < kPairRows; r += 16)
            Wgmma<kPairHeadDim>::template multiply<T, true>(sum, pairs[r / 16], rows.down(r), true);
        wgmma_commit();
    }

    // S and dP to P and dS; `at`: where this lane reads the biases. A key that a mask hides has rows of its own, in
    // whose place zeros are stored.
    __device__ __forceinline__ void differentiate(Pairs& s, Pairs& dp, const PairRowInfo& rows, uint32_t at) const {
        const float scale_log2 = schedule_.scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            ldmatrix_x4_trans(dense, at + n * 8 * kPairBiasCols * sizeof(T));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float4 two = rows.twos[(m * 8 + fragment_col()) / 2];
                const float lse[2] = {two.x, two.y}, delta[2] = {two.z, two.w};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float2 b = unpack<T>(dense[m % 2 * 2 + h]);
                    float *x = s[0][m] + 2 * h, *dx = dp[0][m] + 2 * h;
                    differentiate_pair<false>(x[0], dx[0], fmaf(b.x, kLog2E, -lse[0]), delta[0], scale_log2, 0, true);
                    differentiate_pair<false>(x[1], dx[1], fmaf(b.y, kLog2E, -lse[1]), delta[1], scale_log2, 0, true);
                }
            }
        }
    }

    // Bits 0 and 8: whether this lane's keys are visible.
    __device__ __forceinline__ void store(uint32_t visible) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (!(visible >> h * 8 & 1)) clear_row(h);
            store_row(dkey_, h, schedule_.scale, dkey_rows_ + h * 8 * p_.dkey.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
            store_row(dvalue_, h, 1, dvalue_rows_ + h * 8 * p_.dvalue.row_stride, static_cast<int>(p_.head_dim),
                      key_ + h * 8 < p_.seqlen_k);
        }
    }
    __device__ __forceinline__ void clear_row(int h) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) dkey_[0][n][2 * h + e] = dvalue_[0][n][2 * h + e] = 0;
    }

    const BwdArgs& p_;
    const PairSchedule& schedule_;
    Smem& smem_;
    const PairBlock& block_;
    const int group_;
    const int warp_key_;  // this warp's first key of the group's
    const int key_;  // this lane's first of two, of the sequence
    T *dkey_rows_, *dvalue_rows_;  // from there on, in the current batch element
    const uint32_t bias_lane_;
    Ring<Tile::kKeyStages> key_ring_;
    Ring<Tile::kRowStages> row_ring_, multiplied_ring_;
    DimSum dkey_, dvalue_;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    pair_dkey_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairSchedule schedule,
                     const __grid_constant__ PairBwdMaps maps) {
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairDkeySmem<Tile>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_rings();
    __syncthreads();
    const PairBlock block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        give_registers<Tile::kLoaderRegisters>();
        PairDkeyLoader<Tile>(p, schedule, maps, smem, block).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        PairDkeyConsumer<Tile>(p, schedule, smem, block).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
