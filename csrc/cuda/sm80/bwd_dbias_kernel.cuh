// The gradient of a dense bias that batch elements or query heads share: dx summed over all that share an entry.
//
// A block owns a tile of the gradient and recomputes P and dP of every (batch element, head) that shares it, keeps the
// sum in float32 registers and writes it once: no atomics, and nothing of [B, H, Sq, Sk] in memory. Where tiles are few,
// the sharers are split among blocks, whose sums are added by a second kernel.
#pragma once

#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda {

template <typename Tile>
struct BwdDbiasSmem {
    struct Stage {
        RowStage<Tile, false> rows;
        typename Tile::KeysTile key;
        typename Tile::KeysTile value;
    };
    static constexpr int kStages = Tile::kHeadDim <= 192 ? 2 : 1;
    Stage stages[kStages];
    typename Tile::PairsTile bias;  // and, in the end, the sum
};

// Which tile of the gradient a block owns.
template <typename Tile>
struct DbiasTile {
    int row_tile, key_tile, dbias_head, dbias_batch, index;

    __device__ DbiasTile(const BwdParams& p, int64_t block) {
        const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys);
        const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), Tile::kRows);
        index = static_cast<int>(block);
        key_tile = index % key_tiles;
        row_tile = index / key_tiles % row_tiles;
        dbias_head = index / key_tiles / row_tiles % static_cast<int>(p.dbias.heads);
        dbias_batch = index / key_tiles / row_tiles / static_cast<int>(p.dbias.heads);
    }
};

template <typename Tile>
__device__ __forceinline__ void store_dbias_tile(const float (&sum)[Tile::kScoreM][Tile::kScoreN][4],
                                                 typename Tile::PairsTile& staging, const BwdParams& p, const Sequence& s,
                                                 const DbiasTile<Tile>& at) {
    using T = typename Tile::T;
    const int warp = warp_id();
    store_rounded<T>(sum, staging, warp / Tile::kScoreKeyWarps * Tile::kScoreRows,
                     warp % Tile::kScoreKeyWarps * Tile::kScoreKeys);
    __syncthreads();
    const int first_row = at.row_tile * Tile::kRows, first_key = at.key_tile * Tile::kKeys;
    T* to = static_cast<T*>(p.dbias.data) + (p.dbias.batches > 1 ? s.batch * p.dbias.batch_stride : 0) +
            at.dbias_head * p.dbias.head_stride + (s.first_row + first_row) * p.dbias.row_stride + first_key;
    copy_tile_out(staging, to, p.dbias.row_stride, s.rows - first_row, s.keys - first_key);
}

template <typename Tile, bool kCausal>
__global__ void __launch_bounds__(kBwdThreads, Tile::kSizes.blocks_per_sm)
    bwd_dbias_kernel(const __grid_constant__ BwdParams p) {
    using T = typename Tile::T;
    using Smem = BwdDbiasSmem<Tile>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);

    const int splits = static_cast<int>(p.dbias_splits);
    const DbiasTile<Tile> at(p, blockIdx.x / splits);
    const int split = blockIdx.x % splits;
    const Sequence first(p, at.dbias_batch);  // all that share a tile have its length
    const int first_row = at.row_tile * Tile::kRows, first_key = at.key_tile * Tile::kKeys;
    if (first_row >= first.rows || first_key >= first.keys) return;

    const int warp = warp_id();
    const int score_row = warp / Tile::kScoreKeyWarps * Tile::kScoreRows;
    const int score_key = warp % Tile::kScoreKeyWarps * Tile::kScoreKeys;
    const int rows = first.rows - first_row;

    // The sharers: a batch element's heads one after the other, so that K and V of a group are read together.
    const int heads = static_cast<int>(p.heads / p.dbias.heads), first_head = at.dbias_head * heads;
    const int batches = p.cu_seqlens_q == nullptr && p.dbias.batches == 1 ? static_cast<int>(p.batch) : 1;
    const int sharers = heads * batches;
    const int end = static_cast<int>(static_cast<int64_t>(sharers) * (split + 1) / splits);
    int sharer = static_cast<int>(static_cast<int64_t>(sharers) * split / splits) - 1;
    bool mask_full = true;
    const auto batch_of = [&](int i) { return at.dbias_batch + i / heads; };
    const auto head_of = [&](int i) { return first_head + i % heads; };
    const bool hidden = kCausal && first.causal_end(min(first_row + Tile::kRows, first.rows) - 1) <= first_key;

    // Moves on to the next sharer that the mask leaves a pair of this tile.
    const auto next = [&] {
        while (++sharer < end) {
            if (p.packed_mask.bits == nullptr) return true;
            const Sequence s(p, batch_of(sharer));
            const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p, s, head_of(sharer));
            const auto summary = masks.of(first_row, min(first_row + Tile::kRows, s.rows) - 1, at.key_tile);
            mask_full = summary.full;
            if (!summary.empty) return true;
        }
        return false;
    };
    const auto load = [&](int stage) {
        auto& to = smem.stages[stage];
        const int head = head_of(sharer);
        const Sequence s(p, batch_of(sharer));
        load_row_stage(to.rows, p, s, head, at.row_tile, at.key_tile);
        const int kv_head = head / static_cast<int>(p.heads / p.kv_heads);
        load_keys<Tile>(to.key, to.value, p, s, kv_head, at.key_tile, [](int) { return true; });
        cp_async_commit();
    };

    float sum[Tile::kScoreM][Tile::kScoreN][4];
    clear(sum);
    const auto add_tile = [&](const typename Smem::Stage& stage, int batch, bool full) {
        float scores[Tile::kScoreM][Tile::kScoreN][4], dprobs[Tile::kScoreM][Tile::kScoreN][4];
        clear(scores);
        clear(dprobs);
        using RowsA = OperandA<typename Tile::RowsTile, false>;
        using KeysB = OperandB<typename Tile::KeysTile, false>;
        multiply_add<T, Tile::kHeadDim>(scores, RowsA(stage.rows.query, score_row, 0), KeysB(stage.key, score_key, 0));
        multiply_add<T, Tile::kHeadDim>(dprobs, RowsA(stage.rows.dout, score_row, 0), KeysB(stage.value, score_key, 0));

        const Sequence s(p, batch);
        const TileVisibility<Tile, kCausal> visibility(p, s, stage.rows.mask, at.row_tile, at.key_tile);
        const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
        const auto take = [&](int m, int h, int n, float dx0, float dx1) {
            sum[m][n][2 * h] += dx0;
            sum[m][n][2 * h + 1] += dx1;
        };
        if (softcap > 0) {
            differentiate<Tile, BiasKind::kDense, true, true>(scores, dprobs, stage.rows, smem.bias, visibility, score_row,
                                                              score_key, rows, scale, softcap, take);
        } else if (full && visibility.full()) {
            differentiate<Tile, BiasKind::kDense, false, false>(scores, dprobs, stage.rows, smem.bias, visibility,
                                                                score_row, score_key, rows, scale, softcap, take);
        } else {
            differentiate<Tile, BiasKind::kDense, true, false>(scores, dprobs, stage.rows, smem.bias, visibility, score_row,
                                                               score_key, rows, scale, softcap, take);
        }
    };

    load_bias<Tile>(smem.bias, p, first, first_head, at.row_tile, at.key_tile);
    cp_async_commit();
    bool more = !hidden && next();
    if (more) load(0);
    for (int stage = 0; more; stage = (stage + 1) % Smem::kStages) {
        const int batch = batch_of(sharer);
        const bool full = mask_full;
        wait_for_rows(smem.stages[stage].rows, rows);
        more = next();
        if (Smem::kStages == 2 && more) load(stage ^ 1);
        add_tile(smem.stages[stage], batch, full);
        if (Smem::kStages == 1) {
            __syncthreads();
            if (more) load(0);
        }
    }

    if (splits > 1) {
        const int64_t parts = gridDim.x / splits;
        float* to = p.dbias_parts + (split * parts + at.index) * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n)
                *reinterpret_cast<float4*>(to + (m * Tile::kScoreN + n) * kBwdThreads * 4) =
                    make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
        return;
    }
    cp_async_wait<0>();
    __syncthreads();
    store_dbias_tile<Tile>(sum, smem.bias, p, first, at);
}

// Adds up what the splits made of each tile, in their order.
template <typename Tile>
__global__ void __launch_bounds__(kBwdThreads) sum_dbias_parts_kernel(const __grid_constant__ BwdParams p) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const DbiasTile<Tile> at(p, blockIdx.x);
    const Sequence s(p, at.dbias_batch);
    if (at.row_tile * Tile::kRows >= s.rows || at.key_tile * Tile::kKeys >= s.keys) return;
    float sum[Tile::kScoreM][Tile::kScoreN][4];
    clear(sum);
    for (int64_t split = 0; split < p.dbias_splits; ++split) {
        const float* from = p.dbias_parts + (split * gridDim.x + at.index) * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n) {
                const float4 x = *reinterpret_cast<const float4*>(from + (m * Tile::kScoreN + n) * kBwdThreads * 4);
                sum[m][n][0] += x.x, sum[m][n][1] += x.y, sum[m][n][2] += x.z, sum[m][n][3] += x.w;
            }
    }
    store_dbias_tile<Tile>(sum, *reinterpret_cast<typename Tile::PairsTile*>(shared_memory), p, s, at);
}

}  // namespace flash_dmattn::cuda
