// The forward with a dense bias that batch elements share.
//
// The first warp group loads: its first warp by the copy engine, its second puts zeros in place of what a mask hides. The
// others multiply, 64 query rows each.
//
// Exponents need a base, for which the largest bias of a row does as long as the sums of exponentials come out neither very
// large nor very small: then no score is asked for the largest. Else the base runs, as elsewhere.
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
        uint32_t columns[Tile::kWords];  // keys that are visible
        PairKeyFactors<Tile::kKeys> factors;
    };

    alignas(kTileAlign) typename Tile::QueryTile query;
    alignas(kTileAlign) typename Tile::KeyTile key[Tile::kStages];
    alignas(kTileAlign) typename Tile::KeyTile value[Tile::kStages];
    KeyInfo keys[Tile::kStages];  // of tiles that are not full
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
        if (warp > (pair_hides_keys<Tile::kKeys>(p_) ? 1 : 0)) return;
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
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w) {
                const uint32_t columns = keys.columns(tile, w);
                const int key = w * 32 + lane_id();
                const bool is_visible = columns >> lane_id() & 1;
                if (lane_id() == 0) info.columns[w] = columns;
                info.factors.set(key, is_visible);
                if (is_visible) continue;
                clear_row(smem_.key[stage], key);
                clear_row(smem_.value[stage], key);
            }
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
          warp_row_(warp_id() % 4 * 16), hides_keys_(pair_hides_keys<Tile::kKeys>(p)),
          row_(block.tile * Tile::kRows + group_ * 64 + warp_row_ + fragment_row()),
          out_rows_(static_cast<T*>(p.out.data) + block.begin * p.out.batch_stride + block.head * p.out.head_stride +
                    row_ * p.out.row_stride),
          lse_rows_(static_cast<float*>(p.lse.data) + block.begin * p.lse.batch_stride +
                    block.head * p.lse.head_stride + row_),
          bias_(smem.bias + group_ * schedule.bias_tiles),
          bias_lane_(kept(bias_->lane_down() + warp_row_ * BiasTile::kPanelCols * sizeof(T))), query_ring_(smem.query_ring),
          key_ring_(smem.key_ring), value_ring_(smem.key_ring) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        find_bases();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            query_ring_.wait_full();
            const PairVisits visits = smem_.visits;
            load_query();
            attend(visits);
            store_out();
            out_rows_ += p_.out.batch_stride;
            lse_rows_ += p_.lse.batch_stride;
        }
    }

private:
    static constexpr int kKeys = Tile::kKeys, kTiles = kKeys / 8, kOutTiles = kPairHeadDim / 8;
    static constexpr int kParts = kKeys / kPairBiasCols, kPartTiles = kPairBiasCols / 8;  // of a tile's biases
    using QueryTile = typename Tile::QueryTile;
    using KeyTile = typename Tile::KeyTile;
    using BiasTile = PairBiasTile<T>;
    using Scores = float[1][kTiles][4];
    using Probs = uint32_t[kKeys / 16][4];

    // Q stays in registers; its memory is free at once.
    __device__ __forceinline__ void load_query() {
        const uint32_t lane = smem_.query.lane_down();
#pragma unroll
        for (int d = 0; d < kPairHeadDim; d += 16) QueryTile::load_a(query_[d / 16], lane, group_ * 64 + warp_row_, d);
        fence_async();
        query_ring_.release();
        query_ring_.advance();
    }

    // The largest bias of each row, the tiles of keys where biases hide all of it, and whether the warp's rows may take the
    // largest as bases: P of float16 has no room for such, and of a large one the rounding would show.
    __device__ __forceinline__ void find_bases() {
        base_[0] = base_[1] = kLeastFinite<T>;
        hiding_tiles_[0] = hiding_tiles_[1] = 0;
        for (int tile = 0; tile < schedule_.bias_tiles / kParts; ++tile) {
            const uint32_t lane = bias_lane_ + tile * kParts * sizeof(BiasTile);
            float largest[2] = {kLeastFinite<T>, kLeastFinite<T>};
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                uint32_t b[4];
                BiasTile::load_a(b, lane, n / kPartTiles * 64, n % kPartTiles * 8);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = unpack<T>(b[i]);
                    largest[i % 2] = fmaxf(largest[i % 2], fmaxf(pair.x, pair.y));
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                largest[h] = row_max(largest[h]);
                base_[h] = fmaxf(base_[h], largest[h]);
                hiding_tiles_[h] |= (largest[h] == kLeastFinite<T> ? 1u : 0u) << tile;
            }
        }
        constexpr float kMostBase = 1 << 10;
        bool fits = std::is_same_v<T, bfloat16_t>;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (base_[h] == kLeastFinite<T>) base_[h] = 0;
            fits &= fabsf(base_[h]) <= kMostBase;
        }
        has_bases_ = __all_sync(~0u, fits);
    }

    __device__ __forceinline__ void attend(const PairVisits& visits) {
        clear(out_);
        softmax_ = OnlineSoftmax<1>();
        is_quick_ = has_bases_;
        if (is_quick_) softmax_.max[0] = base_[0], softmax_.max[1] = base_[1];
        if (visits.visited == 0) return;
        Scores scores;
        Probs probs;
        for (uint32_t left = visits.visited; left != 0; left &= left - 1) {
            const int tile = __ffs(left) - 1;
            const bool is_full = visits.full >> tile & 1;
            await_keys();
            issue_query_key(scores);
            wgmma_wait<0>();
            kept_in_flight(scores);
            kept_in_flight(out_);
            if (left != visits.visited) release_keys();
            float factors[2] = {1, 1};  // of the output so far
            exponentiate(scores, factors, tile, is_full);
            if (!is_quick_) softmax_.scale(out_, 0, factors[0]), softmax_.scale(out_, 1, factors[1]);
            to_operand<T>(scores, probs);
            issue_probs_value(probs);
            key_ring_.advance();
        }
        wgmma_wait<0>();
        kept_in_flight(out_);
        release_keys();
    }
    // Also of full tiles: the second warp must not fall behind.
    __device__ __forceinline__ void await_keys() const {
        key_ring_.wait_full();
        if (hides_keys_) mbarrier_wait(smem_address(&smem_.cleared[key_ring_.stage()]), key_ring_.phase());
    }
    __device__ __forceinline__ void release_keys() {
        value_ring_.release();
        value_ring_.advance();
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
    __device__ __forceinline__ void issue_probs_value(const Probs& probs) {
        const Operand<KeyTile> value(smem_.value[value_ring_.stage()]);
        kept_in_flight(out_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kPairHeadDim>::template multiply<T, true>(out_, probs[k / 16], value.down(k), true);
        wgmma_commit();
    }

    // Products of a tile to exponentials, by the rows' bases where these fit.
    __device__ __forceinline__ void exponentiate(Scores& scores, float (&factors)[2], int tile, bool is_full) {
        if (is_quick_) {
            float sum[2];
            is_full ? exponentiate_by_bases<false>(scores, sum, tile) : exponentiate_by_bases<true>(scores, sum, tile);
            is_quick_ = fit(sum, tile);
            if (is_quick_) {
                softmax_.sum[0] += sum[0], softmax_.sum[1] += sum[1];
                return;
            }
            forget_unused_bases();
            multiply_again(scores);
        }
        update_softmax(scores, factors, tile, is_full);
    }
    // Products to exponentials by the rows' bases, and this lane's sums of those that are visible.
    template <bool kMasked>
    __device__ __forceinline__ void exponentiate_by_bases(Scores& scores, float (&sum)[2], int tile) const {
        const float scale_log2 = schedule_.scale * kLog2E;
        const float shift[2] = {base_[0] * kLog2E, base_[1] * kLog2E};
        const uint32_t lane = bias_lane_ + tile * kParts * sizeof(BiasTile);
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t b[4];
            BiasTile::load_a(b, lane, n / kPartTiles * 64, n % kPartTiles * 8);
            float4 visible = {1, 1, 1, 1};
            if (kMasked) visible = smem_.keys[key_ring_.stage()].factors.of(n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                const int h = i % 2;
                const float2 pair = unpack<T>(b[i]);
                float* x = scores[0][n + i / 2] + 2 * h;
                x[0] = fast_exp2(fmaf(x[0], scale_log2, fmaf(pair.x, kLog2E, -shift[h])));
                x[1] = fast_exp2(fmaf(x[1], scale_log2, fmaf(pair.y, kLog2E, -shift[h])));
                sum[h] = fmaf(x[0], i < 2 ? visible.x : visible.z, sum[h]);
                sum[h] = fmaf(x[1], i < 2 ? visible.y : visible.w, sum[h]);
            }
        }
    }
    // Whether the exponentials of all the warp's rows, by such sums, are far from the limits of float32. Where biases hide all
    // of a row, no sum is too small.
    __device__ __forceinline__ bool fit(const float (&sum)[2], int tile) const {
        constexpr float kLeast = 0x1p-80f, kMost = 0x1p40f;
        const bool fits_lane = fminf(sum[0], sum[1]) >= kLeast && sum[0] + sum[1] <= kMost;  // no NaN
        if (__all_sync(~0u, fits_lane)) return true;
        bool fits = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = row_sum(sum[h]);
            fits &= total <= kMost && (total >= kLeast || hiding_tiles_[h] >> tile & 1);
        }
        return __all_sync(~0u, fits);
    }
    // The base runs from here on; where nothing was visible so far, from the start.
    __device__ __forceinline__ void forget_unused_bases() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row_sum(softmax_.sum[h]) == 0) softmax_.max[h] = -kInfinity;
    }
    // Of this warp's rows alone.
    __device__ __forceinline__ void multiply_again(Scores& scores) const {
        clear(scores);
        const auto& key = smem_.key[key_ring_.stage()];
        const uint32_t lane = key.lane_across();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2)
#pragma unroll
            for (int d = 0; d < kPairHeadDim; d += 16) {
                uint32_t b[4];
                KeyTile::load_b(b, lane, n * 8, d);
                mma_m16n8k16<T>(scores[0][n], query_[d / 16], b[0], b[1]);
                mma_m16n8k16<T>(scores[0][n + 1], query_[d / 16], b[2], b[3]);
            }
        fence_async();  // the next keys must not overtake these reads
    }
    // Products to exponentials by a base that runs.
    __device__ __forceinline__ void update_softmax(Scores& scores, float (&factors)[2], int tile, bool is_full) {
        apply_pairs(scores, tile, is_full);
        const auto hide = [&] {
            hide_where_bias_hides<T>(scores, [&](int r, int key) {
                return &bias_[tile * kParts + key / kPairBiasCols].at(warp_row_ + r, key % kPairBiasCols);
            });
        };
        softmax_.update(scores, kLog2E, kLeastFinite<T> / 2, hide, [&](int i, float factor) { factors[i] = factor; });
    }

    // Products to what the softmax sees: scaled, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_pairs(Scores& scores, int tile, bool is_full) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            auto& part_scores = reinterpret_cast<float(&)[1][kPartTiles][4]>(scores[0][part * kPartTiles]);
            scale_and_add_bias<T, 1>(part_scores, schedule_.scale, bias_[tile * kParts + part], warp_row_, 0);
        }
        if (is_full) return;
        VisibleKeys<1, kTiles> visible;
#pragma unroll
        for (int w = 0; w < Tile::kWords; ++w) visible[0][w] = visible[1][w] = smem_.keys[key_ring_.stage()].columns[w];
        hide_invisible(scores, visible);
    }

    __device__ __forceinline__ void store_out() const {
        float sums[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums[h] = row_sum(softmax_.sum[h]);
            const float inverse = sums[h] == 0 ? 0.f : fast_inverse(sums[h]);
            store_row(out_, h, inverse, out_rows_ + h * 8 * p_.out.row_stride, static_cast<int>(p_.head_dim),
                      row_ + h * 8 < p_.seqlen_q);
        }
        // Of the four lanes that hold both rows, the first two take one each.
        const int h = lane_id() % 4;
        const float sum = h == 0 ? sums[0] : sums[1], base = h == 0 ? softmax_.max[0] : softmax_.max[1];
        if (h < 2 && row_ + h * 8 < p_.seqlen_q)
            lse_rows_[h * 8] = sum == 0 ? -kInfinity : base + logf(sum);
    }

    const FwdArgs& p_;
    const PairSchedule& schedule_;
    Smem& smem_;
    const PairBlock& block_;
    const int group_;
    const int warp_row_;  // this warp's first row of the group's
    const bool hides_keys_;
    const int row_;  // this lane's first of two, of the sequence
    T* out_rows_;  // from there on, in the current batch element
    float* lse_rows_;
    BiasTile* const bias_;  // of the group's rows
    const uint32_t bias_lane_;  // where this lane reads of the first, of the warp's rows
    Ring<1> query_ring_;
    Ring<Tile::kStages> key_ring_, value_ring_;
    float base_[2];
    uint32_t hiding_tiles_[2];
    bool has_bases_, is_quick_;  // of the whole warp
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
