// The forward with a dense bias that batch elements share.
//
// The first warp group loads: its first warp by the copy engine, its second puts zeros in place of what a mask hides. The
// others multiply, 64 query rows each.
//
// Exponents need a base, for which the largest bias of a row does as long as q k is not large: then no score is asked for
// the largest (kMostScore). Else the base runs, as elsewhere.
#pragma once

#include "../common/online_softmax.cuh"
#include "../common/scores.cuh"
#include "copy_rows.cuh"
#include "pair_block.cuh"
#include "rows_out.cuh"

namespace flash_dmattn::cuda::sm90 {

// How the copy engine finds the tensors: [D, heads, S, B], of the bias [Sk, Sq, heads, 1].
struct PairFwdMaps {
    CUtensorMap query, key, value, bias;
};

template <typename T_, int kWhich>
struct PairFwdTile {
    using T = T_;
    static constexpr PairFwdTileSizes kSizes = kPairFwdTiles[kWhich];
    static constexpr int kGroups = kSizes.groups, kRows = kGroups * 64, kKeys = kSizes.keys, kStages = kSizes.stages;
    static constexpr int kWords = kKeys / 32, kThreads = (1 + kGroups) * 128;
    static constexpr int kLoaderRegisters = kGroups == 2 ? 56 : 32, kConsumerRegisters = kGroups == 2 ? 224 : 160;
    using QueryTile = SmemTile<T, kRows, kPairHeadDim>;
    using KeyTile = SmemTile<T, kKeys, kPairHeadDim>;
};

template <typename Tile>
struct PairFwdSmem {
    using T = typename Tile::T;
    struct KeyInfo {
        alignas(16) uint32_t columns[Tile::kWords];  // keys that are visible
        PairHiddenKeys<Tile::kKeys> hidden;  // where not all are
        float norm2;  // the largest |k|^2 of them, or more
    };

    alignas(kTileAlign) typename Tile::QueryTile query;
    alignas(kTileAlign) typename Tile::KeyTile key[Tile::kStages];
    alignas(kTileAlign) typename Tile::KeyTile value[Tile::kStages];
    KeyInfo keys[Tile::kStages];
    PairVisits visits;
    RingBarriers<1> query_ring;
    RingBarriers<Tile::kStages> key_ring;
    alignas(8) uint64_t cleared[Tile::kStages];  // completes when no hidden value is left in a stage that is full
    alignas(8) uint64_t bias_full;
    alignas(kTileAlign) PairBiasTile<T> bias[1];  // [groups][bias_tiles]

    static size_t bytes(int bias_tiles) {
        return offsetof(PairFwdSmem, bias) + Tile::kGroups * bias_tiles * sizeof(PairBiasTile<T>);
    }
    // By one thread.
    __device__ void init_rings() {
        query_ring.init(1, Tile::kGroups * 4);
        mbarrier_init(smem_address(&bias_full), 1);
        key_ring.init(1, Tile::kGroups * 4);
        for (auto& barrier : cleared) mbarrier_init(smem_address(&barrier), 1);
    }
};

template <typename Tile>
class PairFwdLoader {
public:
    using Smem = PairFwdSmem<Tile>;
    using T = typename Tile::T;

    __device__ PairFwdLoader(const FwdArgs& p, const PairSchedule& schedule, const PairFwdMaps& maps, Smem& smem,
                             const PairBlock& block)
        : p_(p), schedule_(schedule), maps_(maps), smem_(smem), block_(block), query_ring_(smem.query_ring),
          key_ring_(smem.key_ring) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > 1) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const PairKeys<Tile::kKeys> keys(p_, batch, block_.head);
            if (warp == 1) {
                clear(keys);
            } else if (lane_id() == 0) {
                load(Sequence(p_, batch), keys.visits);
            }
        }
    }

private:
    __device__ void load_bias() {
        const int tiles = schedule_.bias_tiles, head = shared_head(block_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_expecting(full, Tile::kGroups * tiles * static_cast<int>(sizeof(PairBiasTile<T>)));
        for (int i = 0; i < Tile::kGroups * tiles; ++i)
            copy_box(smem_address(&smem_.bias[i]), &maps_.bias, full, i % tiles * kPairBiasCols,
                     block_.tile * Tile::kRows + i / tiles * 64, head, block_.bias_batch);
    }
    __device__ void load(const Sequence& s, const PairVisits& visits) {
        query_ring_.wait_empty();
        smem_.visits = visits;
        mbarrier_arrive_expecting(query_ring_.full(), sizeof(typename Tile::QueryTile));
        copy_rows(smem_.query, maps_.query, query_ring_.full(), p_, s, block_.tile * Tile::kRows, block_.head);
        query_ring_.advance();
        const int head = shared_head(block_.head, p_.heads, p_.kv_heads);
        for (uint32_t left = visits.visited; left != 0; left &= left - 1, key_ring_.advance()) {
            const int key = (__ffs(left) - 1) * Tile::kKeys;
            key_ring_.wait_empty();
            mbarrier_arrive_expecting(key_ring_.full(), 2 * sizeof(typename Tile::KeyTile));
            copy_rows(smem_.key[key_ring_.stage()], maps_.key, key_ring_.full(), p_, s, key, head);
            copy_rows(smem_.value[key_ring_.stage()], maps_.value, key_ring_.full(), p_, s, key, head);
        }
    }

    __device__ void clear(const PairKeys<Tile::kKeys>& keys) {
        for (uint32_t left = keys.visits.visited; left != 0; left &= left - 1, key_ring_.advance()) {
            const int tile = __ffs(left) - 1;
            key_ring_.wait_full();
            const int stage = key_ring_.stage();
            auto& info = smem_.keys[stage];
            float norm2 = 0;
            uint32_t columns[Tile::kWords];
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w) {
                columns[w] = keys.columns(tile, w);
                const int key = w * 32 + lane_id();
                const bool is_visible = columns[w] >> lane_id() & 1;
                if (lane_id() == 0) info.columns[w] = columns[w];
                if (is_visible) {
                    norm2 = max_or_nan(norm2, row_norm2<T>(smem_.key[stage], key));
                } else {
                    clear_row(smem_.key[stage], key);
                    clear_row(smem_.value[stage], key);
                }
            }
            info.hidden.set(columns);
            norm2 = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(norm2)));  // not negative; NaN is largest
            if (lane_id() == 0) info.norm2 = norm2;
            fence_async();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive_here(smem_address(&smem_.cleared[stage]));
        }
    }

    const FwdArgs& p_;
    const PairSchedule& schedule_;
    const PairFwdMaps& maps_;
    Smem& smem_;
    const PairBlock& block_;
    Ring<1> query_ring_;
    Ring<Tile::kStages> key_ring_;
};

template <typename Tile>
class PairFwdConsumer {
public:
    using Smem = PairFwdSmem<Tile>;
    using T = typename Tile::T;

    __device__ PairFwdConsumer(const FwdArgs& p, const PairSchedule& schedule, Smem& smem, const PairBlock& block)
        : p_(p), schedule_(schedule), smem_(smem), block_(block), group_(static_cast<int>(threadIdx.x) / 128 - 1),
          warp_row_(warp_id() % 4 * 16), bias_(smem.bias + group_ * schedule.bias_tiles), query_ring_(smem.query_ring),
          key_ring_(smem.key_ring), multiplied_ring_(smem.key_ring) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        hide_least();
        find_bases();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            query_ring_.wait_full();
            const PairVisits visits = smem_.visits;
            load_query();
            attend(visits);
            store_out(Sequence(p_, batch));
        }
    }

private:
    static constexpr int kKeys = Tile::kKeys, kWords = Tile::kWords, kTiles = kKeys / 8, kOutTiles = kPairHeadDim / 8;
    using QueryTile = typename Tile::QueryTile;
    using KeyTile = typename Tile::KeyTile;
    using BiasTile = PairBiasTile<T>;
    using Scores = float[1][kTiles][4];

    // Q stays in registers; its memory is free at once.
    __device__ __forceinline__ void load_query() {
        const uint32_t lane = smem_.query.lane_down();
#pragma unroll
        for (int d = 0; d < kPairHeadDim; d += 16) QueryTile::load_a(query_[d / 16], lane, group_ * 64 + warp_row_, d);
        fence_async();
        query_ring_.release();
        query_ring_.advance();
    }

    // The least finite bias hides a pair as -inf does: it becomes that, once for all batch elements.
    __device__ __forceinline__ void hide_least() {
        constexpr bool kIsHalf = std::is_same_v<T, half_t>;
        constexpr uint32_t kLeastPair = kIsHalf ? 0xfbfffbffu : 0xff7fff7fu;
        constexpr uint32_t kHidingPair = kIsHalf ? 0xfc00fc00u : 0xff80ff80u;
        auto* words = reinterpret_cast<uint32_t*>(bias_->data);
        for (int i = threadIdx.x % 128; i < schedule_.bias_tiles * 64 * kPairBiasCols / 2; i += 128) {
            const uint32_t is_least = __vcmpeq2(words[i], kLeastPair);
            if (is_least != 0) words[i] = (words[i] & ~is_least) | (kHidingPair & is_least);
        }
        barrier_sync(1 + group_, 128);
    }

    // The largest bias of each row, and whether all of a warp's rows may take it as a base: of what is not hidden none is
    // much smaller, nor NaN.
    __device__ __forceinline__ void find_bases() {
        constexpr float kMostRange = 40, kMostBase = 1 << 10;
        float least[2] = {kInfinity, kInfinity};
        base_[0] = base_[1] = -kInfinity;
        bool is_number = true;
        for (int tile = 0; tile < schedule_.bias_tiles; ++tile) {
            const uint32_t lane = bias_[tile].lane_down() + warp_row_ * BiasTile::kPanelCols * sizeof(T);
#pragma unroll
            for (int col = 0; col < kPairBiasCols; col += 16) {
                uint32_t b[4];
                BiasTile::load_a(b, lane, 0, col);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = unpack<T>(b[i]);
                    is_number &= pair.x == pair.x && pair.y == pair.y;
                    base_[i % 2] = fmaxf(base_[i % 2], fmaxf(pair.x, pair.y));
                    least[i % 2] = fminf(least[i % 2], fminf(pair.x == -kInfinity ? kInfinity : pair.x,
                                                             pair.y == -kInfinity ? kInfinity : pair.y));
                }
            }
        }
        bool fits = is_number && schedule_.scale > 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            base_[h] = row_max(base_[h]);
            if (base_[h] == -kInfinity) base_[h] = least[h] = 0;  // all are hidden
            fits &= base_[h] - least[h] <= kMostRange && fabsf(base_[h]) <= kMostBase;
        }
        has_bases_ = std::is_same_v<T, bfloat16_t> && __all_sync(~0u, fits);  // P of float16 has no room for such a base
    }
    // Times the largest |k|^2, the square of how large a score may be, or less.
    __device__ __forceinline__ float query_norm2(int h) const {
        float sum = 0;
#pragma unroll
        for (int d = 0; d < kPairHeadDim / 16; ++d)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float2 x = unpack<T>(query_[d][h + 2 * i]);
                sum += x.x * x.x + x.y * x.y;
            }
        return row_sum(sum) * schedule_.scale * schedule_.scale;
    }

    __device__ __forceinline__ void attend(const PairVisits& visits) {
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out_[0][n][i] = 0;
        softmax_ = OnlineSoftmax<1>();
        const float norm2 = max_or_nan(query_norm2(0), query_norm2(1));
        bool is_quick = has_bases_;  // of the whole warp
        if (is_quick) softmax_.max[0] = base_[0], softmax_.max[1] = base_[1];
        Scores scores;
        uint32_t probs[kKeys / 16][4];
        for (uint32_t left = visits.visited; left != 0; left &= left - 1) {
            const int tile = __ffs(left) - 1;
            const bool is_full = visits.full >> tile & 1;
            key_ring_.wait_full();
            mbarrier_wait(smem_address(&smem_.cleared[key_ring_.stage()]), key_ring_.phase());
            issue_query_key(scores);
            wgmma_wait<0>();
            kept_in_flight(scores);
            kept_in_flight(out_);
            if (left != visits.visited) release_keys();
            constexpr float kMostScore = 20;
            const bool fits = norm2 * smem_.keys[key_ring_.stage()].norm2 <= kMostScore * kMostScore;
            if (is_quick && __all_sync(~0u, fits)) {
                is_full ? exponentiate<false>(scores, tile) : exponentiate<true>(scores, tile);
            } else {
                if (is_quick) {
                    is_quick = false;
                    forget_unused_bases();
                }
                apply_pairs(scores, tile, is_full);
                softmax_.update(
                    scores, kLog2E, -kInfinity, [] {}, [&](int i, float factor) { softmax_.scale(out_, i, factor); });
            }
            to_operand<T>(scores, probs);
            issue_probs_value(probs);
            key_ring_.advance();
        }
        wgmma_wait<0>();
        kept_in_flight(out_);
        if (visits.visited != 0) release_keys();
    }
    // The base runs from here on; where nothing was visible so far, from the start.
    __device__ __forceinline__ void forget_unused_bases() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row_sum(softmax_.sum[h]) == 0) softmax_.max[h] = -kInfinity;
    }
    // Products to probabilities by the rows' bases.
    template <bool kMasked>
    __device__ __forceinline__ void exponentiate(Scores& scores, int tile) {
        const float scale_log2 = schedule_.scale * kLog2E;
        const float shift[2] = {base_[0] * kLog2E, base_[1] * kLog2E};
        uint32_t hidden[kTiles];
        if (kMasked) smem_.keys[key_ring_.stage()].hidden.load(hidden);
#pragma unroll
        for (int part = 0; part < kKeys / kPairBiasCols; ++part) {
            const BiasTile& bias = bias_[tile * (kKeys / kPairBiasCols) + part];
            const uint32_t lane = bias.lane_down() + warp_row_ * BiasTile::kPanelCols * sizeof(T);
#pragma unroll
            for (int col = 0; col < kPairBiasCols; col += 16) {
                const int n = (part * kPairBiasCols + col) / 8;
                uint32_t b[4];
                BiasTile::load_a(b, lane, 0, col);
                if (kMasked) PairHiddenKeys<kKeys>::template hide<T>(b, hidden, n);
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                    const int h = i % 2;
                    const float2 pair = unpack<T>(b[i]);
                    float* x = scores[0][n + i / 2] + 2 * h;
                    x[0] = fast_exp2(fmaf(x[0], scale_log2, fmaf(pair.x, kLog2E, -shift[h])));
                    x[1] = fast_exp2(fmaf(x[1], scale_log2, fmaf(pair.y, kLog2E, -shift[h])));
                    softmax_.sum[h] += x[0] + x[1];
                }
            }
        }
    }
    __device__ __forceinline__ void release_keys() {
        multiplied_ring_.release();
        multiplied_ring_.advance();
    }

    __device__ __forceinline__ void issue_query_key(Scores& scores) const {
        const Operand<KeyTile> key(smem_.key[key_ring_.stage()]);
        kept_in_flight(scores);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairHeadDim; d += 16)
            Wgmma<kKeys>::template multiply<T, false>(scores, query_[d / 16], key.across(d), d > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_probs_value(const uint32_t (&probs)[kKeys / 16][4]) {
        const Operand<KeyTile> value(smem_.value[key_ring_.stage()]);
        kept_in_flight(out_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kPairHeadDim>::template multiply<T, true>(out_, probs[k / 16], value.down(k), true);
        wgmma_commit();
    }

    // Products to what the softmax sees: scaled, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_pairs(Scores& scores, int tile, bool is_full) const {
        constexpr int kPartTiles = kPairBiasCols / 8;
#pragma unroll
        for (int part = 0; part < kTiles / kPartTiles; ++part) {
            auto& part_scores = reinterpret_cast<float(&)[1][kPartTiles][4]>(scores[0][part * kPartTiles]);
            const BiasTile& bias = bias_[tile * (kKeys / kPairBiasCols) + part];
            scale_and_add_bias<T, 1>(part_scores, schedule_.scale, bias, warp_row_, 0);
        }
        if (is_full) return;
        VisibleKeys<1, kTiles> visible;
#pragma unroll
        for (int w = 0; w < kWords; ++w) visible[0][w] = visible[1][w] = smem_.keys[key_ring_.stage()].columns[w];
        hide_invisible(scores, visible);
    }

    __device__ __forceinline__ void store_out(const Sequence& s) {
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, s, block_.head);
        float* lse_of_row = static_cast<float*>(p_.lse.data) + stat_offset(p_.lse, s, block_.head);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = block_.tile * Tile::kRows + group_ * 64 + warp_row_ + h * 8 + fragment_row();
            float lse;
            const float inverse = softmax_.finish(h, 1, lse);
            const bool exists = row < s.rows;
            if (leads_row() && exists) lse_of_row[row] = lse;
            store_row(out_, h, inverse, out + row * p_.out.row_stride, static_cast<int>(p_.head_dim), exists);
        }
    }

    const FwdArgs& p_;
    const PairSchedule& schedule_;
    Smem& smem_;
    const PairBlock& block_;
    const int group_;
    const int warp_row_;  // this warp's first row of the group's
    BiasTile* const bias_;  // of the group's rows
    Ring<1> query_ring_;
    Ring<Tile::kStages> key_ring_, multiplied_ring_;
    float base_[2];
    bool has_bases_;
    OnlineSoftmax<1> softmax_;
    uint32_t query_[kPairHeadDim / 16][4];
    float out_[1][kOutTiles][4];
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    pair_fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ PairSchedule schedule,
                    const __grid_constant__ PairFwdMaps maps) {
    extern __shared__ __align__(kTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairFwdSmem<Tile>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_rings();
    __syncthreads();
    const PairBlock block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        give_registers<Tile::kLoaderRegisters>();
        PairFwdLoader<Tile>(p, schedule, maps, smem, block).run();
    } else {
        take_registers<Tile::kConsumerRegisters>();
        PairFwdConsumer<Tile>(p, schedule, smem, block).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
