// The forward with a dense bias that batch elements share.
//
// The first warp group loads: its first warp by the copy engine, its second puts zeros in place of what a mask hides. The
// others multiply, 64 query rows each.
//
// Exponents need a base, for which the largest bias of a row does as long as the sums of exponentials come out neither very
// large nor very small: then no score is asked for the largest. Else the base runs, as elsewhere.
#pragma once

#include "cuda/arch/math.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "work_tile.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

// How the copy engine finds the tensors: [D, heads, S, B], of the bias [Sk, Sq, heads, 1].
struct PairBiasFwdMaps {
    CUtensorMap query, key, value, bias;
};

template <typename T_, int kWhich>
struct PairBiasFwdKernelTraits {
    using T = T_;
    static constexpr PairBiasFwdTileSizes kSizes = kPairBiasFwdTiles[kWhich];
    static constexpr int kConsumerWarpgroups = kSizes.groups, kRows = kConsumerWarpgroups * 64, kKeys = kSizes.keys,
                         kStages = kSizes.stages;
    static constexpr int kWords = kKeys / 32, kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 56 : 32,
                         kConsumerRegisters = kConsumerWarpgroups == 2 ? 224 : 160;
    using QueryTile = SmemTile<T, kRows, kPairBiasHeadDim>;
    using KeyTile = SmemTile<T, kKeys, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairFwdSharedStorage {
    using T = typename Traits::T;
    struct KeyInfo {
        uint32_t columns[Traits::kWords];  // keys that are visible
        PairBiasKeyFactors<Traits::kKeys> factors;
    };

    alignas(kSmemTileAlign) typename Traits::QueryTile query;
    alignas(kSmemTileAlign) typename Traits::KeyTile key[Traits::kStages];
    alignas(kSmemTileAlign) typename Traits::KeyTile value[Traits::kStages];
    KeyInfo keys[Traits::kStages];  // of tiles that are not full
    PairBiasActiveBlocks visits;
    PipelineBarriers<1> query_pipeline;
    PipelineBarriers<Traits::kStages> key_pipeline;
    alignas(8) uint64_t cleared[Traits::kStages];  // completes when no hidden value is left in a stage that is full
    alignas(8) uint64_t bias_full;
    alignas(kSmemTileAlign) PairBiasSmemTile<T> bias[1];  // [groups][bias_tiles]

    static size_t bytes(int bias_tiles) {
        return offsetof(PairFwdSharedStorage, bias) +
               Traits::kConsumerWarpgroups * bias_tiles * sizeof(PairBiasSmemTile<T>);
    }
    // By one thread.
    __device__ void init_pipelines() {
        query_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        mbarrier_init(smem_address(&bias_full), 1);
        key_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        for (auto& barrier : cleared) mbarrier_init(smem_address(&barrier), 1);
    }
};

template <typename Traits>
class PairBiasFwdProducer {
public:
    using SharedStorage = PairFwdSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasFwdProducer(const FwdArgs& p, const PairBiasSchedule& schedule, const PairBiasFwdMaps& maps,
                                   SharedStorage& smem, const PairBiasWorkTile& block)
        : p_(p),
          schedule_(schedule),
          maps_(maps),
          smem_(smem),
          block_(block),
          query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp > (pair_bias_hides_keys<Traits::kKeys>(p_) ? 1 : 0)) return;
        if (threadIdx.x == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const PairBiasKeys<Traits::kKeys> keys(p_, batch, block_.head);
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
        mbarrier_arrive_and_expect_tx(
            full, Traits::kConsumerWarpgroups * tiles * static_cast<int>(sizeof(PairBiasSmemTile<T>)));
        for (int i = 0; i < Traits::kConsumerWarpgroups * tiles; ++i)
            tma_load_4d(smem_address(&smem_.bias[i]), &maps_.bias, full, i % tiles * kPairBiasCols,
                        block_.tile * Traits::kRows + i / tiles * 64, head, block_.bias_batch);
    }
    __device__ void load(const Sequence& s, const PairBiasActiveBlocks& visits) {
        query_pipeline_.producer_acquire();
        smem_.visits = visits;
        mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename Traits::QueryTile));
        copy_rows(smem_.query, maps_.query, query_pipeline_.full(), p_, s, block_.tile * Traits::kRows, block_.head);
        query_pipeline_.advance();
        const int head = shared_head(block_.head, p_.heads, p_.kv_heads);
        for (uint32_t left = visits.visited; left != 0; left &= left - 1, key_pipeline_.advance()) {
            const int key = (__ffs(left) - 1) * Traits::kKeys;
            key_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(key_pipeline_.full(), 2 * sizeof(typename Traits::KeyTile));
            copy_rows(smem_.key[key_pipeline_.stage()], maps_.key, key_pipeline_.full(), p_, s, key, head);
            copy_rows(smem_.value[key_pipeline_.stage()], maps_.value, key_pipeline_.full(), p_, s, key, head);
        }
    }

    __device__ void clear(const PairBiasKeys<Traits::kKeys>& keys) {
        for (uint32_t left = keys.visits.visited; left != 0; left &= left - 1, key_pipeline_.advance()) {
            const int tile = __ffs(left) - 1;
            key_pipeline_.consumer_wait();
            const int stage = key_pipeline_.stage();
            auto& info = smem_.keys[stage];
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) {
                const uint32_t columns = keys.columns(tile, w);
                const int key = w * 32 + lane_id();
                const bool is_visible = columns >> lane_id() & 1;
                if (lane_id() == 0) info.columns[w] = columns;
                info.factors.set(key, is_visible);
                if (is_visible) continue;
                clear_row(smem_.key[stage], key);
                clear_row(smem_.value[stage], key);
            }
            fence_proxy_async();
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(smem_address(&smem_.cleared[stage]));
        }
    }

    const FwdArgs& p_;
    const PairBiasSchedule& schedule_;
    const PairBiasFwdMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
    Pipeline<1> query_pipeline_;
    Pipeline<Traits::kStages> key_pipeline_;
};

template <typename Traits>
class PairBiasFwdConsumer {
public:
    using SharedStorage = PairFwdSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasFwdConsumer(const FwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                   const PairBiasWorkTile& block)
        : p_(p),
          schedule_(schedule),
          smem_(smem),
          block_(block),
          warpgroup_(static_cast<int>(threadIdx.x) / 128 - 1),
          warp_row_(warp_id() % 4 * 16),
          hides_keys_(pair_bias_hides_keys<Traits::kKeys>(p)),
          row_(block.tile * Traits::kRows + warpgroup_ * 64 + warp_row_ + fragment_row()),
          out_rows_(static_cast<T*>(p.out.data) + block.begin * p.out.batch_stride + block.head * p.out.head_stride +
                    row_ * p.out.row_stride),
          lse_rows_(static_cast<float*>(p.lse.data) + block.begin * p.lse.batch_stride +
                    block.head * p.lse.head_stride + row_),
          bias_(smem.bias + warpgroup_ * schedule.bias_tiles),
          bias_lane_(opaque(bias_->lane_down() + warp_row_ * BiasTile::kSlabCols * sizeof(T))),
          query_pipeline_(smem.query_pipeline),
          key_pipeline_(smem.key_pipeline),
          value_pipeline_(smem.key_pipeline) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        find_fixed_max();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            query_pipeline_.consumer_wait();
            const PairBiasActiveBlocks visits = smem_.visits;
            load_query();
            attend(visits);
            store_out();
            out_rows_ += p_.out.batch_stride;
            lse_rows_ += p_.lse.batch_stride;
        }
    }

private:
    static constexpr int kKeys = Traits::kKeys, kTiles = kKeys / 8, kOutTiles = kPairBiasHeadDim / 8;
    static constexpr int kParts = kKeys / kPairBiasCols, kPartTiles = kPairBiasCols / 8;  // of a tile's biases
    using QueryTile = typename Traits::QueryTile;
    using KeyTile = typename Traits::KeyTile;
    using BiasTile = PairBiasSmemTile<T>;
    using Scores = float[1][kTiles][4];
    using Probs = uint32_t[kKeys / 16][4];

    // Q stays in registers; its memory is free at once.
    __device__ __forceinline__ void load_query() {
        const uint32_t lane = smem_.query.lane_down();
#pragma unroll
        for (int d = 0; d < kPairBiasHeadDim; d += 16)
            QueryTile::load_a(query_[d / 16], lane, warpgroup_ * 64 + warp_row_, d);
        fence_proxy_async();
        query_pipeline_.release();
        query_pipeline_.advance();
    }

    // The largest bias of each row, the tiles of keys where biases hide all of it, and whether the warp's rows may take the
    // largest as bases: P of float16 has no room for such, and of a large one the rounding would show.
    __device__ __forceinline__ void find_fixed_max() {
        fixed_max_[0] = fixed_max_[1] = kLeastFinite<T>;
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
                fixed_max_[h] = fmaxf(fixed_max_[h], largest[h]);
                hiding_tiles_[h] |= (largest[h] == kLeastFinite<T> ? 1u : 0u) << tile;
            }
        }
        constexpr float kMaxFixedMax = 1 << 10;
        bool fits = std::is_same_v<T, bfloat16_t>;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (fixed_max_[h] == kLeastFinite<T>) fixed_max_[h] = 0;
            fits &= fabsf(fixed_max_[h]) <= kMaxFixedMax;
        }
        has_fixed_max_ = __all_sync(~0u, fits);
    }

    __device__ __forceinline__ void attend(const PairBiasActiveBlocks& visits) {
        clear(out_);
        softmax_ = OnlineSoftmax<1>();
        uses_fixed_max_ = has_fixed_max_;
        if (uses_fixed_max_) softmax_.max[0] = fixed_max_[0], softmax_.max[1] = fixed_max_[1];
        if (visits.visited == 0) return;
        Scores scores;
        Probs probs;
        for (uint32_t left = visits.visited; left != 0; left &= left - 1) {
            const int tile = __ffs(left) - 1;
            const bool is_full = visits.full >> tile & 1;
            wait_for_keys();
            gemm_qk(scores);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(out_);
            if (left != visits.visited) release_keys();
            float factors[2] = {1, 1};  // of the output so far
            exponentiate(scores, factors, tile, is_full);
            if (!uses_fixed_max_ && __any_sync(~0u, factors[0] != 1 || factors[1] != 1)) {
                softmax_.scale(out_, 0, factors[0]);
                softmax_.scale(out_, 1, factors[1]);
            }
            to_a_operand<T>(scores, probs);
            gemm_pv(probs);
            key_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(out_);
        release_keys();
    }
    // Also of full tiles: the second warp must not fall behind.
    __device__ __forceinline__ void wait_for_keys() const {
        key_pipeline_.consumer_wait();
        if (hides_keys_) mbarrier_wait(smem_address(&smem_.cleared[key_pipeline_.stage()]), key_pipeline_.phase());
    }
    __device__ __forceinline__ void release_keys() {
        value_pipeline_.release();
        value_pipeline_.advance();
    }

    __device__ __forceinline__ void gemm_qk(Scores& scores) const {
        const SmemDescriptor<KeyTile> key(smem_.key[key_pipeline_.stage()]);
        warpgroup_fence_operand(scores);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairBiasHeadDim; d += 16)
            Wgmma<kKeys>::template multiply<T, false>(scores, query_[d / 16], key.across(d), d > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void gemm_pv(const Probs& probs) {
        const SmemDescriptor<KeyTile> value(smem_.value[value_pipeline_.stage()]);
        warpgroup_fence_operand(out_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys; k += 16)
            Wgmma<kPairBiasHeadDim>::template multiply<T, true>(out_, probs[k / 16], value.down(k), true);
        wgmma_commit_group();
    }

    // Products of a tile to exponentials, by the rows' bases where these fit.
    __device__ __forceinline__ void exponentiate(Scores& scores, float (&factors)[2], int tile, bool is_full) {
        if (uses_fixed_max_) {
            float sum[2];
            is_full ? exponentiate_fixed_max<false>(scores, sum, tile)
                    : exponentiate_fixed_max<true>(scores, sum, tile);
            uses_fixed_max_ = fit(sum, tile);
            if (uses_fixed_max_) {
                softmax_.sum[0] += sum[0], softmax_.sum[1] += sum[1];
                return;
            }
            drop_unused_fixed_max();
            multiply_again(scores);
        }
        update_softmax(scores, factors, tile, is_full);
    }
    // Products to exponentials by the rows' bases, and this lane's sums of those that are visible.
    template <bool kMasked>
    __device__ __forceinline__ void exponentiate_fixed_max(Scores& scores, float (&sum)[2], int tile) const {
        const float scale_log2 = schedule_.scale * kLog2E;
        const float shift[2] = {fixed_max_[0] * kLog2E, fixed_max_[1] * kLog2E};
        const uint32_t lane = bias_lane_ + tile * kParts * sizeof(BiasTile);
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t b[4];
            BiasTile::load_a(b, lane, n / kPartTiles * 64, n % kPartTiles * 8);
            float4 visible = {1, 1, 1, 1};
            if (kMasked) visible = smem_.keys[key_pipeline_.stage()].factors.of(n);
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
    // Whether the exponentials of all the warp's rows, by such sums, are far from the limits of float32. Where biases hide
    // all of a row, no sum is too small.
    __device__ __forceinline__ bool fit(const float (&sum)[2], int tile) const {
        constexpr float kLeast = 0x1p-80f, kMax = 0x1p40f;
        const bool fits_lane = fminf(sum[0], sum[1]) >= kLeast && sum[0] + sum[1] <= kMax;  // no NaN
        if (__all_sync(~0u, fits_lane)) return true;
        bool fits = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = row_sum(sum[h]);
            fits &= total <= kMax && (total >= kLeast || hiding_tiles_[h] >> tile & 1);
        }
        return __all_sync(~0u, fits);
    }
    // The base runs from here on; where nothing was visible so far, from the start.
    __device__ __forceinline__ void drop_unused_fixed_max() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row_sum(softmax_.sum[h]) == 0) softmax_.max[h] = -kInfinity;
    }
    // Of this warp's rows alone.
    __device__ __forceinline__ void multiply_again(Scores& scores) const {
        clear(scores);
        const auto& key = smem_.key[key_pipeline_.stage()];
        const uint32_t lane = key.lane_across();
#pragma unroll
        for (int n = 0; n < kTiles; n += 2)
#pragma unroll
            for (int d = 0; d < kPairBiasHeadDim; d += 16) {
                uint32_t b[4];
                KeyTile::load_b(b, lane, n * 8, d);
                mma_m16n8k16<T>(scores[0][n], query_[d / 16], b[0], b[1]);
                mma_m16n8k16<T>(scores[0][n + 1], query_[d / 16], b[2], b[3]);
            }
        fence_proxy_async();  // the next keys must not overtake these reads
    }
    // Products to exponentials by a base that runs.
    __device__ __forceinline__ void update_softmax(Scores& scores, float (&factors)[2], int tile, bool is_full) {
        apply_mask_and_bias(scores, tile, is_full);
        const auto hide = [&] {
            apply_bias_mask<T>(scores, [&](int r, int key) {
                return &bias_[tile * kParts + key / kPairBiasCols].at(warp_row_ + r, key % kPairBiasCols);
            });
        };
        softmax_.update(scores, kLog2E, kLeastFinite<T> / 2, hide, [&](int i, float factor) { factors[i] = factor; });
    }

    // Products to what the softmax sees: scaled, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_mask_and_bias(Scores& scores, int tile, bool is_full) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            auto& part_scores = reinterpret_cast<float (&)[1][kPartTiles][4]>(scores[0][part * kPartTiles]);
            scale_and_add_bias<T, 1>(part_scores, schedule_.scale, bias_[tile * kParts + part], warp_row_, 0);
        }
        if (is_full) return;
        VisibleKeys<1, kTiles> visible;
#pragma unroll
        for (int w = 0; w < Traits::kWords; ++w)
            visible[0][w] = visible[1][w] = smem_.keys[key_pipeline_.stage()].columns[w];
        apply_mask(scores, visible);
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
        if (h < 2 && row_ + h * 8 < p_.seqlen_q) lse_rows_[h * 8] = sum == 0 ? -kInfinity : base + logf(sum);
    }

    const FwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
    const int warpgroup_;
    const int warp_row_;  // this warp's first row of the group's
    const bool hides_keys_;
    const int row_;  // this lane's first of two, of the sequence
    T* out_rows_;    // from there on, in the current batch element
    float* lse_rows_;
    BiasTile* const bias_;      // of the group's rows
    const uint32_t bias_lane_;  // where this lane reads of the first, of the warp's rows
    Pipeline<1> query_pipeline_;
    Pipeline<Traits::kStages> key_pipeline_, value_pipeline_;
    float fixed_max_[2];
    uint32_t hiding_tiles_[2];
    bool has_fixed_max_, uses_fixed_max_;  // of the whole warp
    OnlineSoftmax<1> softmax_;
    uint32_t query_[kPairBiasHeadDim / 16][4];
    float out_[1][kOutTiles][4];
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                         const __grid_constant__ PairBiasFwdMaps maps) {
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairFwdSharedStorage<Traits>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_pipelines();
    __syncthreads();
    const PairBiasWorkTile block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasFwdProducer<Traits>(p, schedule, maps, smem, block).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasFwdConsumer<Traits>(p, schedule, smem, block).run();
    }
}

}  // namespace flash_dmattn::cuda::sm90
