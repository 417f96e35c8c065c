// dQ, and the gradient of a dense bias that batch elements share.
//
// A block owns 64 query rows. Two warp groups multiply, of all rows, each by half of the keys: the gradients of these biases
// stay in their registers while they go over the batch elements. The first warp group loads: its first warp by the copy
// engine, its second what comes with rows, the others what comes with a group's keys.
#pragma once

#include "cuda/arch/math.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "row_stats.cuh"
#include "cuda/arch/store_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

// kKeyTiles: tiles of 64 keys of a group.
template <typename T_, int kKeyTiles_>
struct PairBiasDqueryKernelTraits {
    using T = T_;
    static constexpr int kConsumerWarpgroups = 2, kKeyTiles = kKeyTiles_,
                         kAllKeyTiles = kConsumerWarpgroups * kKeyTiles;
    static constexpr int kRowStages = 2, kKeyStages = 6;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    using RowsTile = SmemTile<T, kPairBiasRows, kPairBiasHeadDim>;
    using KeysTile = SmemTile<T, 64, kPairBiasHeadDim>;
};

template <typename Traits>
struct PairDquerySharedStorage {
    using T = typename Traits::T;
    // Of one batch element.
    struct Rows {
        typename Traits::RowsTile query, out, dout;
    };
    // What comes with them.
    struct RowsInfo {
        PairBiasActiveBlocks visits;
        PairBiasRowInfo rows;
    };
    struct Keys {
        typename Traits::KeysTile key, value;
    };

    alignas(kSmemTileAlign) Rows rows[Traits::kRowStages];
    alignas(kSmemTileAlign) Keys keys[Traits::kConsumerWarpgroups][Traits::kKeyStages];
    alignas(kSmemTileAlign) PairBiasSmemTile<T> bias[Traits::kAllKeyTiles];
    float4 dquery[2][Traits::kConsumerWarpgroups][kPairBiasHeadDim / 8]
                 [128];  // of the last batch elements, each group's sum
    RowsInfo infos[Traits::kRowStages];
    PairBiasKeyFactors<64> factors[Traits::kConsumerWarpgroups][Traits::kKeyStages];  // of tiles that are not full
    PipelineBarriers<Traits::kRowStages> row_pipeline;
    PipelineBarriers<Traits::kKeyStages> key_pipelines[Traits::kConsumerWarpgroups];
    // Complete when what comes with a stage is there.
    alignas(8) uint64_t rows_cleared[Traits::kRowStages];
    alignas(8) uint64_t keys_cleared[Traits::kConsumerWarpgroups][Traits::kKeyStages];
    alignas(8) uint64_t bias_full;

    // By one thread.
    __device__ void init_pipelines() {
        row_pipeline.init(1, Traits::kConsumerWarpgroups * 4);
        mbarrier_init(smem_address(&bias_full), 1);
        for (auto& barrier : rows_cleared) mbarrier_init(smem_address(&barrier), 1);
        for (auto& pipeline : key_pipelines) pipeline.init(1, 4);
        for (auto& pipeline : keys_cleared)
            for (auto& barrier : pipeline) mbarrier_init(smem_address(&barrier), 1);
    }
};

// Where blocks leave their sums of the bias's gradient: [splits, biases, heads,
// row tiles, key tiles, 64 x 64 as registers hold it].
template <typename Traits>
__device__ __forceinline__ float* pair_bias_dbias_part(const BwdArgs& p, int64_t split, int64_t tile, int n_block) {
    return p.dbias_parts + ((split * p.dbias_tiles + tile) * Traits::kAllKeyTiles + n_block) * kPairBiasDbiasTile;
}

template <typename Traits>
class PairBiasDqueryProducer {
public:
    using SharedStorage = PairDquerySharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDqueryProducer(const BwdArgs& p, const PairBiasBwdMaps& maps, SharedStorage& smem,
                                      const PairBiasWorkTile& block)
        : p_(p), maps_(maps), smem_(smem), block_(block) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp == 0) return load();
        if (warp == 1) return produce_row_stats();
        if (pair_bias_hides_keys<64>(p_)) produce_key_info(warp - 2);
    }

private:
    using KeyPipeline = Pipeline<Traits::kKeyStages>;

    __device__ void load() {
        Pipeline<Traits::kRowStages> row_pipeline(smem_.row_pipeline);
        KeyPipeline key_pipelines[Traits::kConsumerWarpgroups] = {KeyPipeline(smem_.key_pipelines[0]),
                                                                  KeyPipeline(smem_.key_pipelines[1])};
        const int head = shared_head(block_.head, p_.heads, p_.kv_heads);
        if (lane_id() == 0) load_bias();
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const Sequence s(p_, batch);
            const PairBiasActiveBlocks visits = PairBiasKeys<64>(p_, batch, block_.head).visits;
            if (lane_id() != 0) continue;
            row_pipeline.producer_acquire();
            smem_.infos[row_pipeline.stage()].visits = visits;
            load_rows(s, smem_.rows[row_pipeline.stage()], row_pipeline.full());
            row_pipeline.advance();
#pragma unroll
            for (int t = 0; t < Traits::kKeyTiles; ++t)
#pragma unroll
                for (int group = 0; group < Traits::kConsumerWarpgroups; ++group) {
                    const int tile = group * Traits::kKeyTiles + t;
                    if (!(visits.visited >> tile & 1)) continue;
                    KeyPipeline& pipeline = key_pipelines[group];
                    auto& keys = smem_.keys[group][pipeline.stage()];
                    pipeline.producer_acquire();
                    mbarrier_arrive_and_expect_tx(pipeline.full(), sizeof(keys));
                    copy_rows(keys.key, maps_.key, pipeline.full(), p_, s, tile * 64, head);
                    copy_rows(keys.value, maps_.value, pipeline.full(), p_, s, tile * 64, head);
                    pipeline.advance();
                }
        }
    }
    __device__ void load_bias() {
        const int head = shared_head(block_.head, p_.heads, p_.bias.heads);
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(full, sizeof(smem_.bias));
        for (int tile = 0; tile < Traits::kAllKeyTiles; ++tile)
            tma_load_4d(smem_address(&smem_.bias[tile]), &maps_.bias, full, tile * 64, block_.tile * kPairBiasRows,
                        head, block_.bias_batch);
    }
    __device__ void load_rows(const Sequence& s, typename SharedStorage::Rows& rows, uint32_t full) {
        const int row = block_.tile * kPairBiasRows;
        mbarrier_arrive_and_expect_tx(full, sizeof(rows));
        copy_rows(rows.query, maps_.query, full, p_, s, row, block_.head);
        copy_rows(rows.out, maps_.out, full, p_, s, row, block_.head);
        copy_rows(rows.dout, maps_.dout, full, p_, s, row, block_.head);
    }

    // Their lse, and D_i, which the other kernel is told, too.
    __device__ void produce_row_stats() {
        Pipeline<Traits::kRowStages> pipeline(smem_.row_pipeline);
        const int first_row = block_.tile * kPairBiasRows;
        for (int batch = block_.begin; batch < block_.end; ++batch, pipeline.advance()) {
            const Sequence s(p_, batch);
            const PairBiasRowStats stats(p_, p_.dlse, s, block_.head, first_row);
            auto& rows = smem_.rows[pipeline.stage()];
            auto& info = smem_.infos[pipeline.stage()].rows;
            pipeline.consumer_wait();
            stats.clear_empty(rows.query, rows.out, rows.dout);
            __syncwarp();
            multiply_out_dout(rows, info);
            float* delta = static_cast<float*>(p_.delta.data) + stat_offset(p_.delta, s, block_.head) + first_row;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * lane_id() + i;
                info.lse(row) = stats.lse[i];
                info.delta(row) -= stats.delta[i];
                if (first_row + row < s.rows) delta[row] = info.delta(row);
            }
            announce(smem_.rows_cleared[pipeline.stage()]);
        }
    }
    // do_i o_i, on the diagonal of dO O^T.
    __device__ void multiply_out_dout(const typename SharedStorage::Rows& rows, PairBiasRowInfo& info) {
        using RowsTile = typename Traits::RowsTile;
        const uint32_t dout = rows.dout.lane_down(), out = rows.out.lane_across();
#pragma unroll
        for (int first = 0; first < kPairBiasRows; first += 16) {
            float products[2][4] = {};  // by the first and the last eight of these rows
#pragma unroll
            for (int d = 0; d < kPairBiasHeadDim; d += 16) {
                uint32_t a[4], b[4];
                RowsTile::load_a(a, dout, first, d);
                RowsTile::load_b(b, out, first, d);
                mma_m16n8k16<T>(products[0], a, b[0], b[1]);
                mma_m16n8k16<T>(products[1], a, b[2], b[3]);
            }
            const int row = fragment_row();
            if (row / 2 * 2 == fragment_col()) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    info.delta(first + h * 8 + row) = row % 2 == 0 ? products[h][2 * h] : products[h][2 * h + 1];
            }
            __syncwarp();
        }
    }

    // Which of a group's keys are visible, and zeros in place of the others.
    __device__ void produce_key_info(int group) {
        KeyPipeline pipeline(smem_.key_pipelines[group]);
        for (int batch = block_.begin; batch < block_.end; ++batch) {
            const PairBiasKeys<64> keys(p_, batch, block_.head);
            for (int t = 0; t < Traits::kKeyTiles; ++t) {
                const int tile = group * Traits::kKeyTiles + t;
                if (!(keys.visits.visited >> tile & 1)) continue;
                pipeline.consumer_wait();
                produce_key_info(smem_.keys[group][pipeline.stage()], smem_.factors[group][pipeline.stage()], keys,
                                 tile);
                announce(smem_.keys_cleared[group][pipeline.stage()]);
                pipeline.advance();
            }
        }
    }
    __device__ void produce_key_info(typename SharedStorage::Keys& stage, PairBiasKeyFactors<64>& factors,
                                     const PairBiasKeys<64>& keys, int tile) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const int key = w * 32 + lane_id();
            const bool is_visible = keys.columns(tile, w) >> lane_id() & 1;
            factors.set(key, is_visible);
            if (is_visible) continue;
            clear_row(stage.key, key);
            clear_row(stage.value, key);
        }
    }
    __device__ void announce(uint64_t& cleared) {
        fence_proxy_async();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(smem_address(&cleared));
    }

    const BwdArgs& p_;
    const PairBiasBwdMaps& maps_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
};

template <typename Traits>
class PairBiasDqueryConsumer {
public:
    using SharedStorage = PairDquerySharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDqueryConsumer(const BwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                      const PairBiasWorkTile& block)
        : p_(p),
          schedule_(schedule),
          smem_(smem),
          block_(block),
          warpgroup_(uniform(static_cast<int>(threadIdx.x) / 128 - 1)),
          warp_row_(warp_id() % 4 * 16),
          hides_keys_(pair_bias_hides_keys<64>(p)),
          row_(block.tile * kPairBiasRows + warp_row_ + fragment_row()),
          dquery_rows_(static_cast<T*>(p.dquery.data) + block.head * p.dquery.head_stride + row_ * p.dquery.row_stride),
          row_pipeline_(smem.row_pipeline),
          key_pipeline_(smem.key_pipelines[warpgroup_]),
          multiplied_pipeline_(smem.key_pipelines[warpgroup_]),
          bias_lane_(opaque(smem.bias[first_tile()].lane_down() + warp_row_ * BiasTile::kSlabCols * sizeof(T))) {
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
            row_pipeline_.consumer_wait();
            mbarrier_wait(smem_address(&smem_.rows_cleared[row_pipeline_.stage()]), row_pipeline_.phase());
            sum();
            row_pipeline_.release();
            row_pipeline_.advance();
            if (batch > block_.begin) store_dquery(batch - 1);
            produce_dq(batch);
        }
        store_dquery(block_.end - 1);
        store_dbias();
    }

private:
    static constexpr int kKeyTiles = Traits::kKeyTiles, kTiles = 64 / 8, kDimTiles = kPairBiasHeadDim / 8;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using BiasTile = PairBiasSmemTile<T>;
    using Pairs = float[1][kTiles][4];
    using DimSum = float[1][kDimTiles][4];
    using Packed = uint32_t[64 / 16][4];

    // The group's first tile of keys.
    __device__ int first_tile() const { return warpgroup_ * kKeyTiles; }

    __device__ __forceinline__ void sum() {
        const auto& rows = smem_.rows[row_pipeline_.stage()];
        auto& info = smem_.infos[row_pipeline_.stage()];
        const PairBiasActiveBlocks visits = info.visits;
        float lse[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            lse[h] = info.rows.lse(warp_row_ + h * 8 + fragment_row());
            delta[h] = info.rows.delta(warp_row_ + h * 8 + fragment_row());
        }
        const SmemDescriptor<RowsTile> query(rows.query), dout(rows.dout);
        clear(dquery_);
        Packed dscores;
        bool is_first = true;
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
            const int tile = first_tile() + t, stage = key_pipeline_.stage();
            if (!(visits.visited >> tile & 1)) continue;
            const bool is_full = visits.full >> tile & 1;
            key_pipeline_.consumer_wait();
            if (hides_keys_) mbarrier_wait(smem_address(&smem_.keys_cleared[warpgroup_][stage]), key_pipeline_.phase());
            const auto& keys = smem_.keys[warpgroup_][stage];
            const SmemDescriptor<KeysTile> key(keys.key), value(keys.value);
            Pairs scores, dprobs;
            issue_scores(scores, query, key);
            issue_scores(dprobs, dout, value);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(dprobs);
            warpgroup_fence_operand(dquery_);
            if (!is_first) release_keys();
            is_first = false;
            differentiate(scores, dprobs, lse, delta, t);
            is_full ? add_dbias(t, dprobs) : add_dbias(t, dprobs, smem_.factors[warpgroup_][stage]);
            to_a_operand<T>(dprobs, dscores);
            gemm_dq(dscores, key);
            key_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dquery_);
        if (!is_first) release_keys();
    }
    __device__ __forceinline__ void release_keys() {
        multiplied_pipeline_.release();
        multiplied_pipeline_.advance();
    }
    __device__ __forceinline__ void add_dbias(int t, const Pairs& dscores) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dbias_[t][n][i] += dscores[0][n][i];
    }
    // Where some keys are hidden. Since their rows of K are 0, dS of them has no part in dQ as long as it is finite, which
    // in float16 it need not be.
    __device__ __forceinline__ void add_dbias(int t, Pairs& dscores, const PairBiasKeyFactors<64>& factors) {
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            const float4 x = factors.of(n);
            const float visible[2][2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float dscore = dscores[0][n + m][i] * visible[m][i % 2];
                    dbias_[t][n + m][i] += dscore;
                    if constexpr (std::is_same_v<T, half_t>) dscores[0][n + m][i] = dscore;
                }
        }
    }

    // S = Q K^T, or dP = dO V^T.
    static __device__ __forceinline__ void issue_scores(Pairs& pairs, const SmemDescriptor<RowsTile>& rows,
                                                        const SmemDescriptor<KeysTile>& keys) {
        warpgroup_fence_operand(pairs);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < kPairBiasHeadDim; d += 16)
            Wgmma<64>::template multiply<T, false, false>(pairs, rows.across(d), keys.across(d), d > 0);
        wgmma_commit_group();
    }
    // dQ += dS K.
    __device__ __forceinline__ void gemm_dq(const Packed& dscores, const SmemDescriptor<KeysTile>& keys) {
        warpgroup_fence_operand(dquery_);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 64; k += 16)
            Wgmma<kPairBiasHeadDim>::template multiply<T, true>(dquery_, dscores[k / 16], keys.down(k), true);
        wgmma_commit_group();
    }

    // S and dP to dS, anything finite where a mask hides the key: its bias may be NaN.
    __device__ __forceinline__ void differentiate(const Pairs& s, Pairs& dp, const float (&lse)[2],
                                                  const float (&delta)[2], int t) const {
        const float scale_log2 = schedule_.scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            uint32_t dense[4];
            BiasTile::load_a(dense, bias_lane_, t * 64, n * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                const int h = i % 2, m = n + i / 2;
                const float2 b = unpack<T>(dense[i]);
                const float shift[2] = {fmaf(b.x, kLog2E, -lse[h]), fmaf(b.y, kLog2E, -lse[h])};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float prob = fast_exp2(fminf(fmaf(s[0][m][2 * h + e], scale_log2, shift[e]), 0.f));
                    dp[0][m][2 * h + e] = prob * (dp[0][m][2 * h + e] - delta[h]);
                }
            }
        }
    }

    // The groups take turns at adding up both sums of a batch element and storing dQ: after the next element, so that
    // neither need wait for the other.
    __device__ __forceinline__ void produce_dq(int batch) {
        const int turn = batch & 1;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            const float* x = dquery_[0][n];
            smem_.dquery[turn][warpgroup_][n][threadIdx.x % 128] = {x[0], x[1], x[2], x[3]};
        }
        if (warpgroup_ != turn) named_barrier_arrive(1 + turn, 256);
    }
    __device__ __forceinline__ void store_dquery(int batch) {
        const int turn = batch & 1;
        if (warpgroup_ != turn) return;
        named_barrier_sync(1 + turn, 256);
        DimSum sum;
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
            const float4 x = smem_.dquery[turn][0][n][threadIdx.x % 128];
            const float4 y = smem_.dquery[turn][1][n][threadIdx.x % 128];
            sum[0][n][0] = x.x + y.x, sum[0][n][1] = x.y + y.y, sum[0][n][2] = x.z + y.z, sum[0][n][3] = x.w + y.w;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(sum, h, schedule_.scale,
                      dquery_rows_ + batch * p_.dquery.batch_stride + h * 8 * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim), row_ + h * 8 < p_.seqlen_q);
    }

    __device__ __forceinline__ void store_dbias() const {
        if (p_.dbias_parts == nullptr) return;
        const int64_t head = block_.bias_batch * p_.heads + block_.head;
        const int64_t tile = head * schedule_.tiles + block_.tile;
        float* to = pair_bias_dbias_part<Traits>(p_, block_.split, tile, first_tile());
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const float* x = dbias_[t][n];
                reinterpret_cast<float4*>(to)[(t * kTiles + n) * 128 + threadIdx.x % 128] = {x[0], x[1], x[2], x[3]};
            }
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& block_;
    const int warpgroup_;
    const int warp_row_;  // this warp's first row of the block's
    const bool hides_keys_;
    const int row_;         // this lane's first of two, of the sequence
    T* const dquery_rows_;  // from there on, in batch element 0
    Pipeline<Traits::kRowStages> row_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_, multiplied_pipeline_;
    const uint32_t bias_lane_;  // where this lane reads the group's biases, of the warp's rows
    DimSum dquery_;
    float dbias_[kKeyTiles][kTiles][4];
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    pair_bias_dquery_kernel(const __grid_constant__ BwdArgs p, const __grid_constant__ PairBiasSchedule schedule,
                            const __grid_constant__ PairBiasBwdMaps maps) {
    extern __shared__ __align__(kSmemTileAlign) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<PairDquerySharedStorage<Traits>*>(raw_smem);
    if (threadIdx.x == 0) smem.init_pipelines();
    __syncthreads();
    const PairBiasWorkTile block(schedule, static_cast<int>(p.heads), static_cast<int>(p.bias.batches));
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<Traits::kProducerRegisters>();
        PairBiasDqueryProducer<Traits>(p, maps, smem, block).run();
    } else {
        warpgroup_reg_alloc<Traits::kConsumerRegisters>();
        PairBiasDqueryConsumer<Traits>(p, schedule, smem, block).run();
    }
}

// The parts of the bias's gradient to rows of its dtype. A block of 128 threads adds up 64 rows by kPairBiasDbiasCols keys.
constexpr int kPairBiasDbiasCols = 32;

template <typename Traits>
__global__ void __launch_bounds__(128) pair_bias_dbias_kernel(const __grid_constant__ BwdArgs p) {
    using T = typename Traits::T;
    constexpr int kTiles = kPairBiasDbiasCols / 8, kColTiles = Traits::kAllKeyTiles * 64 / kPairBiasDbiasCols;
    const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), kPairBiasRows);
    const int col = blockIdx.x % kColTiles * kPairBiasDbiasCols, tile = blockIdx.x / kColTiles;
    if (col >= p.seqlen_k) return;
    float sum[1][kTiles][4] = {};
#pragma unroll 4
    for (int split = 0; split < p.dbias_splits; ++split) {
        const float* from = pair_bias_dbias_part<Traits>(p, split, tile, col / 64);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const float4 x = reinterpret_cast<const float4*>(from)[(col % 64 / 8 + n) * 128 + threadIdx.x];
            sum[0][n][0] += x.x, sum[0][n][1] += x.y, sum[0][n][2] += x.z, sum[0][n][3] += x.w;
        }
    }
    const int64_t head = tile / num_m_blocks % p.heads, bias_batch = tile / num_m_blocks / p.heads;
    T* to = static_cast<T*>(p.dbias.data) + bias_batch * p.dbias.batch_stride + head * p.dbias.head_stride + col;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int64_t row = tile % num_m_blocks * kPairBiasRows + warp_id() * 16 + h * 8 + fragment_row();
        store_row(sum, h, 1, to + row * p.dbias.row_stride, static_cast<int>(p.seqlen_k) - col, row < p.seqlen_q);
    }
}

}  // namespace flash_dmattn::cuda::sm90
