// The gradient of a dense bias that batch elements or query heads share: dx summed over all that share an entry.
//
// A block makes a run of tiles of the gradient, one after the other: it recomputes P and dP of every (batch element,
// head) that shares a tile, keeps the sum in float32 registers and writes it once. No atomics, and nothing of
// [B, H, Sq, Sk] in memory. Where tiles are few, the sharers are split among blocks, whose sums a second kernel adds up.
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
    static constexpr int kStages = Tile::kHeadDim <= 64 ? 2 : 1;  // as many blocks as registers allow come first
    Stage stages[kStages];
};

// Which tiles of the gradient a block makes: [key_tile, key_end) of a row of tiles.
template <typename Tile>
struct DbiasRun {
    int row_tile, key_tile, key_end, dbias_head, dbias_batch, split;
    int64_t index;  // of the first tile, among all

    __device__ DbiasRun(const BwdParams& p, int block) {
        const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys), run = static_cast<int>(p.dbias_run);
        const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), Tile::kRows), runs = ceil_div(key_tiles, run);
        const int splits = static_cast<int>(p.dbias_splits), heads = static_cast<int>(p.dbias.heads);
        split = block % splits;
        key_tile = block / splits % runs * run;
        key_end = min(key_tile + run, key_tiles);
        const int above = block / splits / runs;
        row_tile = above % row_tiles;
        dbias_head = above / row_tiles % heads;
        dbias_batch = above / row_tiles / heads;
        index = static_cast<int64_t>(above) * key_tiles + key_tile;
    }
};

// Calls visit(m, h, n, row, key) for every pair of neighbouring keys that this lane holds of a tile.
template <typename Tile, typename Visit>
__device__ __forceinline__ void for_each_pair(const Visit& visit) {
    const int row = warp_id() / Tile::kScoreKeyWarps * Tile::kScoreRows + lane_id() / 4;
    const int key = warp_id() % Tile::kScoreKeyWarps * Tile::kScoreKeys + lane_id() % 4 * 2;
#pragma unroll
    for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n) visit(m, h, n, row + m * 16 + h * 8, key + n * 8);
}

// Whether a tile is whole and its pairs of keys are aligned, as most are: then a pair is one access.
template <typename Tile, typename T>
__device__ __forceinline__ bool is_plain(const T* tile, const PairView& view, int rows, int keys) {
    return rows >= Tile::kRows && keys >= Tile::kKeys && view.col_stride == 1 && view.row_stride % 2 == 0 &&
           reinterpret_cast<uintptr_t>(tile) % 4 == 0;
}

template <typename Tile>
__device__ __forceinline__ void store_dbias_tile(const float (&sum)[Tile::kScoreM][Tile::kScoreN][4],
                                                 const BwdParams& p, const Sequence& s, const DbiasRun<Tile>& run,
                                                 int key_tile) {
    using T = typename Tile::T;
    const int rows = s.rows - run.row_tile * Tile::kRows, keys = s.keys - key_tile * Tile::kKeys;
    T* to = static_cast<T*>(p.dbias.data) + (p.dbias.batches > 1 ? s.batch * p.dbias.batch_stride : 0) +
            run.dbias_head * p.dbias.head_stride + (s.first_row + run.row_tile * Tile::kRows) * p.dbias.row_stride +
            key_tile * Tile::kKeys;
    const bool plain = is_plain<Tile>(to, p.dbias, rows, keys);
    for_each_pair<Tile>([&](int m, int h, int n, int row, int key) {
        const float first = sum[m][n][2 * h], second = sum[m][n][2 * h + 1];
        T* at = to + row * p.dbias.row_stride + key;
        if (plain) {
            *reinterpret_cast<uint32_t*>(at) = pack<T>(first, second);
        } else if (row < rows) {
            if (key < keys) at[0] = T(first);
            if (key + 1 < keys) at[1] = T(second);
        }
    });
}

template <typename Tile, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kSizes.blocks_per_sm)
    bwd_dbias_kernel(const __grid_constant__ BwdParams p) {
    if constexpr (!Tile::kIsUsed) return;
    using T = typename Tile::T;
    using Smem = BwdDbiasSmem<Tile>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const SharedMemory address_of(shared_memory);

    const DbiasRun<Tile> run(p, blockIdx.x);
    const Sequence first(p, run.dbias_batch);  // all that share a tile have its length
    const int first_row = run.row_tile * Tile::kRows, last_row = min(first_row + Tile::kRows, first.rows) - 1;
    if (first_row >= first.rows || run.key_tile * Tile::kKeys >= first.keys) return;
    const int key_end = min(run.key_end, ceil_div(first.keys, Tile::kKeys));

    // The sharers: a batch element's heads one after the other, so that K and V of a group are read together.
    const int heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads), first_head = run.dbias_head * heads;
    const int batches = p.cu_seqlens_q == nullptr && p.dbias.batches == 1 ? static_cast<int>(p.batch) : 1;
    const int group = static_cast<int>(p.heads) / static_cast<int>(p.kv_heads);
    const int splits = static_cast<int>(p.dbias_splits);
    const int64_t sharers = heads * batches;
    const int sharer_begin = static_cast<int>(sharers * run.split / splits);
    const int sharer_end = static_cast<int>(sharers * (run.split + 1) / splits);
    const auto batch_of = [&](int sharer) { return run.dbias_batch + sharer / heads; };
    const auto head_of = [&](int sharer) { return first_head + sharer % heads; };
    // Keys that causality leaves to the tile's last row.
    const int visible_keys = kCausal ? first.causal_end(last_row) : first.keys;

    // What is to be added next: of a tile, the sharers that the mask leaves a pair of. Warps look ahead together.
    int key_tile = run.key_tile, sharer = 0, next_window = sharer_begin;
    bool mask_full = true;
    uint32_t pending = 0, full = 0;
    const auto next = [&] {
        while (pending == 0) {
            if (next_window >= sharer_end) {
                next_window = sharer_begin;
                ++key_tile;
            }
            if (key_tile >= key_end || key_tile * Tile::kKeys >= visible_keys) return false;
            const int candidate = next_window + lane_id();
            bool is_empty = candidate >= sharer_end, is_full = true;
            if (!is_empty && has_mask(p)) {
                const Sequence s(p, batch_of(candidate));
                const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p, s, head_of(candidate));
                const auto summary = masks.of(first_row, last_row, key_tile);
                is_empty = summary.empty;
                is_full = summary.full;
            }
            pending = __ballot_sync(~0u, !is_empty);
            full = __ballot_sync(~0u, is_full);
            next_window += 32;
        }
        const int lane = __ffs(pending) - 1;
        pending &= pending - 1;
        sharer = next_window - 32 + lane;
        mask_full = full >> lane & 1;
        return true;
    };
    const auto load = [&](int stage) {
        auto& to = smem.stages[stage];
        const int in_group = sharer / heads, head = first_head + sharer - in_group * heads;
        const Sequence s(p, run.dbias_batch + in_group);
        load_row_stage(to.rows, address_of, p, s, head, run.row_tile, key_tile);
        const int first_key = key_tile * Tile::kKeys, kv_head = head / group;
        const auto load_keys = [&](typename Tile::KeysTile& tile, const RowsView& view) {
            const T* from =
                static_cast<const T*>(view.data) + key_offset(view, s, kv_head) + first_key * view.row_stride;
            copy_tile_async<typename Tile::KeysTile, Tile::kThreads>(address_of(tile), from, view.row_stride,
                                                                     s.keys - first_key, static_cast<int>(p.head_dim));
        };
        load_keys(to.key, p.key);
        load_keys(to.value, p.value);
        cp_async_commit();
    };

    uint32_t bias[Tile::kScoreM][Tile::kScoreN][2];
    const auto load_bias = [&](int tile) {
        const int rows = first.rows - first_row, keys = first.keys - tile * Tile::kKeys;
        const T* from = static_cast<const T*>(p.bias.data) + pair_offset(p.bias, first, first_head, p.heads) +
                        first_row * p.bias.row_stride + tile * Tile::kKeys * p.bias.col_stride;
        const bool plain = is_plain<Tile>(from, p.bias, rows, keys);
        for_each_pair<Tile>([&](int m, int h, int n, int row, int key) {
            const T* at = from + row * p.bias.row_stride;
            if (plain) {
                bias[m][n][h] = *reinterpret_cast<const uint32_t*>(at + key);
            } else {
                const auto load = [&](int k) {
                    return row < rows && k < keys ? to_float(at[k * p.bias.col_stride]) : 0.f;
                };
                bias[m][n][h] = pack<T>(load(key), load(key + 1));
            }
        });
    };

    float sum[Tile::kScoreM][Tile::kScoreN][4];
    clear(sum);
    const auto add_tile = [&](const typename Smem::Stage& stage, int tile, bool full, int first_m) {
        const int score_row = warp_id() / Tile::kScoreKeyWarps * Tile::kScoreRows + first_m * 16;
        const int score_key = warp_id() % Tile::kScoreKeyWarps * Tile::kScoreKeys;
        float scores[Tile::kPassM][Tile::kScoreN][4], dprobs[Tile::kPassM][Tile::kScoreN][4];
        clear(scores);
        clear(dprobs);
        using RowsA = OperandA<typename Tile::RowsTile, false>;
        using KeysB = OperandB<typename Tile::KeysTile, false>;
        multiply_add<T, Tile::kHeadDim>(scores, RowsA(address_of(stage.rows.query), score_row, 0),
                                        KeysB(address_of(stage.key), score_key, 0));
        multiply_add<T, Tile::kHeadDim>(dprobs, RowsA(address_of(stage.rows.dout), score_row, 0),
                                        KeysB(address_of(stage.value), score_key, 0));

        const TileVisibility<Tile, kCausal> visibility(p, first, stage.rows, run.row_tile, tile);
        const int rows = first.rows - first_row;
        const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
        const auto dense_bias = [&](uint32_t(&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = bias[first_m + m][n + i / 2][i % 2];
        };
        const auto take = [&](int m, int h, int n, float dx0, float dx1) {
            sum[first_m + m][n][2 * h] += dx0;
            sum[first_m + m][n][2 * h + 1] += dx1;
        };
        if (softcap > 0) {
            differentiate<Tile, BiasKind::kDense, true, true>(scores, dprobs, stage.rows, dense_bias, visibility,
                                                              score_row, score_key, rows, scale, softcap, take);
        } else if (full && visibility.full()) {
            differentiate<Tile, BiasKind::kDense, false, false>(scores, dprobs, stage.rows, dense_bias, visibility,
                                                                score_row, score_key, rows, scale, softcap, take);
        } else {
            differentiate<Tile, BiasKind::kDense, true, false>(scores, dprobs, stage.rows, dense_bias, visibility,
                                                               score_row, score_key, rows, scale, softcap, take);
        }
    };

    int open = run.key_tile;  // the tile that is being summed
    const auto store_until = [&](int tile) {
        for (; open < tile; ++open) {
            if (splits == 1) {
                store_dbias_tile<Tile>(sum, p, first, run, open);
            } else {
                const int64_t part = run.split * p.dbias_tiles + run.index + open - run.key_tile;
                float* to = p.dbias_parts + part * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
                for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
                    for (int n = 0; n < Tile::kScoreN; ++n)
                        *reinterpret_cast<float4*>(to + (m * Tile::kScoreN + n) * Tile::kThreads * 4) =
                            make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
            }
            clear(sum);
        }
    };

    bool more = next();
    if (more) load(0);
    int bias_tile = -1;
    for (int stage = 0; more; stage = (stage + 1) % Smem::kStages) {
        const int tile = key_tile;
        const bool is_full = mask_full;
        store_until(tile);
        if (bias_tile != tile) load_bias(tile);
        bias_tile = tile;
        wait_for_rows(smem.stages[stage].rows, first.rows - first_row);
        more = next();
        if (Smem::kStages == 2 && more) load(stage ^ 1);
#pragma unroll
        for (int pass = 0; pass < Tile::kPasses; ++pass)
            add_tile(smem.stages[stage], tile, is_full, pass * Tile::kPassM);
        if (Smem::kStages == 1) {
            __syncthreads();
            if (more) load(0);
        }
    }
    store_until(key_end);
}

// Adds up what the splits made of each tile, in their order.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) sum_dbias_parts_kernel(const __grid_constant__ BwdParams p) {
    const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys),
              run_length = static_cast<int>(p.dbias_run);
    const int runs = ceil_div(key_tiles, run_length), splits = static_cast<int>(p.dbias_splits);
    const int tile = blockIdx.x % key_tiles;
    const DbiasRun<Tile> run(p, (static_cast<int>(blockIdx.x) / key_tiles * runs + tile / run_length) * splits);
    const Sequence s(p, run.dbias_batch);
    if (run.row_tile * Tile::kRows >= s.rows || tile * Tile::kKeys >= s.keys) return;
    float sum[Tile::kScoreM][Tile::kScoreN][4];
    clear(sum);
    for (int64_t split = 0; split < splits; ++split) {
        const float* from =
            p.dbias_parts + (split * p.dbias_tiles + blockIdx.x) * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n) {
                const float4 x = *reinterpret_cast<const float4*>(from + (m * Tile::kScoreN + n) * Tile::kThreads * 4);
                sum[m][n][0] += x.x, sum[m][n][1] += x.y, sum[m][n][2] += x.z, sum[m][n][3] += x.w;
            }
    }
    store_dbias_tile<Tile>(sum, p, s, run, tile);
}

}  // namespace flash_dmattn::cuda
