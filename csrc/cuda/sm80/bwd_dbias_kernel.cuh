// The gradient of a dense bias that batch elements or query heads share, where the main kernel cannot sum it: dx summed
// over all that share an entry.
//
// A block makes a run of tiles of the gradient, one after the other: it recomputes P and dP of every (batch element,
// head) that shares a tile, keeps the sum in float32 registers and writes it once. No atomics, and nothing of
// [B, H, Sq, Sk] in memory. Where tiles are few, the sharers are split among blocks, whose sums a second kernel adds up.
#pragma once

#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// Where the rows and the keys of one that shares a tile begin.
template <typename T>
struct Sharer {
    HeadRows<T> rows;
    const T* key;
    const T* value;

    Sharer() = default;
    __device__ Sharer(const BwdArgs& p, const Sequence& s, int head) : rows(p, s, head) {
        const int kv_head = shared_head(head, p.heads, p.kv_heads);
        key = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head);
        value = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head);
    }
};

template <typename Tile>
struct BwdDbiasSmem {
    struct Stage {
        RowStage<Tile, false> rows;
        typename Tile::KeysTile key;
        typename Tile::KeysTile value;
    };
    static constexpr int kStages = Tile::kHeadDim <= 64 ? 2 : 1;  // as many blocks as registers allow come first
    Stage stages[kStages];
    Sharer<typename Tile::T> sharers[Tile::kThreads / 32][32];  // that each warp looks ahead to
};

// Which tiles of the gradient a block makes: [key_tile, key_end) of a row of tiles.
template <typename Tile>
struct DbiasRun {
    int row_tile, key_tile, key_end, dbias_head, split;
    int first_batch;  // of those that share the gradient's
    int64_t index;  // of the first tile, among all

    __device__ DbiasRun(const BwdArgs& p, int block) {
        const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys), run = static_cast<int>(p.dbias_run);
        const int row_tiles = ceil_div(static_cast<int>(p.seqlen_q), Tile::kRows), runs = ceil_div(key_tiles, run);
        const int splits = static_cast<int>(p.dbias_splits), heads = static_cast<int>(p.dbias.heads);
        split = block % splits;
        key_tile = block / splits % runs * run;
        key_end = min(key_tile + run, key_tiles);
        const int above = block / splits / runs;
        row_tile = above % row_tiles;
        dbias_head = above / row_tiles % heads;
        first_batch = above / row_tiles / heads * static_cast<int>(p.dbias.batch_sharers);
        index = static_cast<int64_t>(above) * key_tiles + key_tile;
    }
};

// Calls visit(m, h, row, key) for every row that this lane holds of a tile; its pairs of neighbouring keys begin at key + 8 n.
template <typename Tile, typename Visit>
__device__ __forceinline__ void for_each_row(const Visit& visit) {
    const int row = warp_id() / Tile::kScoreKeyWarps * Tile::kScoreRows + fragment_row();
    const int key = warp_id() % Tile::kScoreKeyWarps * Tile::kScoreKeys + fragment_col();
#pragma unroll
    for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) visit(m, h, row + m * 16 + h * 8, key);
}

template <typename Tile>
__device__ __forceinline__ void store_dbias_tile(const float (&sum)[Tile::kScoreM][Tile::kScoreN][4],
                                                 const BwdArgs& p, const Sequence& s, const DbiasRun<Tile>& run,
                                                 int key_tile) {
    using T = typename Tile::T;
    const int rows = s.rows - run.row_tile * Tile::kRows, keys = s.keys - key_tile * Tile::kKeys;
    T* to = static_cast<T*>(p.dbias.data) + shared_batch(p.dbias, s) * p.dbias.batch_stride +
            run.dbias_head * p.dbias.head_stride + (s.first_row + run.row_tile * Tile::kRows) * p.dbias.row_stride +
            key_tile * Tile::kKeys;
    if (is_plain<Tile>(to, p.dbias, rows, keys)) {
        for_each_row<Tile>([&](int m, int h, int row, int key) {
            T* at = to + static_cast<uint32_t>(row) * p.dbias.row_stride + key;
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n)
                *reinterpret_cast<uint32_t*>(at + n * 8) = pack<T>(sum[m][n][2 * h], sum[m][n][2 * h + 1]);
        });
        return;
    }
    for_each_row<Tile>([&](int m, int h, int row, int key) {
        if (row >= rows) return;
        T* at = to + row * p.dbias.row_stride;
#pragma unroll
        for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (key + n * 8 + e < keys) at[key + n * 8 + e] = T(sum[m][n][2 * h + e]);
    });
}

template <typename Tile, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kSizes.blocks_per_sm)
    bwd_dbias_kernel(const __grid_constant__ BwdArgs p) {
    if constexpr (!Tile::kIsUsed) return;
    using T = typename Tile::T;
    using Smem = BwdDbiasSmem<Tile>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const SharedMemory address_of(shared_memory);

    const DbiasRun<Tile> run(p, blockIdx.x);
    const Sequence first(p, run.first_batch);  // all that share a tile have its length
    const int first_row = run.row_tile * Tile::kRows, last_row = min(first_row + Tile::kRows, first.rows) - 1;
    if (first_row >= first.rows || run.key_tile * Tile::kKeys >= first.keys) return;
    const int key_end = min(run.key_end, ceil_div(first.keys, Tile::kKeys));

    // The sharers: a batch element's heads one after the other, so that K and V of a group are read together.
    const int heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads), first_head = run.dbias_head * heads;
    const int splits = static_cast<int>(p.dbias_splits);
    const int64_t sharers = heads * p.dbias.batch_sharers;
    const int sharer_begin = static_cast<int>(sharers * run.split / splits);
    const int sharer_end = static_cast<int>(sharers * (run.split + 1) / splits);
    // Keys that causality leaves to the tile's last row.
    const int visible_keys = kCausal ? first.causal_end(last_row) : first.keys;

    // What is to be added next: of a tile, the sharers that the mask leaves a pair of. Each warp keeps where those lie that
    // it looks ahead to.
    auto& window = smem.sharers[warp_id()];
    LookAhead ahead{sharer_begin};
    int key_tile = run.key_tile, sharer = 0, found_window = -1;
    const auto next = [&] {
        while (ahead.pending == 0) {
            if (ahead.next >= sharer_end) {
                ahead.next = sharer_begin;
                ++key_tile;
            }
            if (key_tile >= key_end || key_tile * Tile::kKeys >= visible_keys) return false;
            const bool is_new = found_window != ahead.next;
            found_window = ahead.next;
            if (is_new) __syncwarp();
            ahead.look(sharer_end, [&](int candidate, bool& is_empty, bool& is_full) {
                const int head = first_head + candidate % heads;
                Sequence s = first;
                s.batch += candidate / heads;
                if (is_new) window[lane_id()] = Sharer<T>(p, s, head);
                if (!has_mask(p)) return;
                const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p, s, head);
                const auto summary = masks.of(first_row, last_row, key_tile);
                is_empty = summary.empty;
                is_full = summary.full;
            });
            if (is_new) __syncwarp();
        }
        sharer = ahead.take();
        return true;
    };
    const auto load = [&](int stage) {
        auto& to = smem.stages[stage];
        const Sharer<T>& from = window[sharer];
        load_row_stage(to.rows, address_of, p, first, from.rows, first_row, first.rows - first_row, key_tile);
        const auto load_keys = [&](typename Tile::KeysTile& tile, const T* keys, int64_t row_stride) {
            const int first_key = key_tile * Tile::kKeys;
            copy_tile_async<typename Tile::KeysTile, Tile::kThreads>(
                address_of(tile), keys, row_stride, first_key, first.keys - first_key, static_cast<int>(p.head_dim));
        };
        load_keys(to.key, from.key, p.key.row_stride);
        load_keys(to.value, from.value, p.value.row_stride);
        cp_async_commit();
    };

    uint32_t bias[Tile::kScoreM][Tile::kScoreN][2];
    const auto load_bias = [&](int tile) {
        const int rows = first.rows - first_row, keys = first.keys - tile * Tile::kKeys;
        const T* from = static_cast<const T*>(p.bias.data) + pair_offset(p.bias, first, first_head, p.heads) +
                        first_row * p.bias.row_stride + tile * Tile::kKeys * p.bias.col_stride;
        if (is_plain<Tile>(from, p.bias, rows, keys)) {
            for_each_row<Tile>([&](int m, int h, int row, int key) {
                const T* at = from + static_cast<uint32_t>(row) * p.bias.row_stride + key;
#pragma unroll
                for (int n = 0; n < Tile::kScoreN; ++n)
                    bias[m][n][h] = *reinterpret_cast<const uint32_t*>(at + n * 8);
            });
            return;
        }
        for_each_row<Tile>([&](int m, int h, int row, int key) {
            const auto load = [&](int k) {
                const bool in_sequence = row < rows && k < keys;
                return in_sequence ? to_float(from[row * p.bias.row_stride + k * p.bias.col_stride]) : 0.f;
            };
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n) bias[m][n][h] = pack<T>(load(key + n * 8), load(key + n * 8 + 1));
        });
    };

    float sum[Tile::kScoreM][Tile::kScoreN][4] = {};
    using RowsA = OperandA<typename Tile::RowsTile, false>;
    using KeysB = OperandB<typename Tile::KeysTile, false>;
    const int first_score_row = warp_id() / Tile::kScoreKeyWarps * Tile::kScoreRows;
    const int score_key = warp_id() % Tile::kScoreKeyWarps * Tile::kScoreKeys;
    const uint32_t rows_at = kept(RowsA::lane_offset(first_score_row, 0));
    const uint32_t keys_at = kept(KeysB::lane_offset(score_key, 0));
    const auto add_tile = [&](const typename Smem::Stage& stage, int tile, bool full, int first_n) {
        float scores[Tile::kScoreM][Tile::kPassN][4], dprobs[Tile::kScoreM][Tile::kPassN][4];
        const uint32_t pass_at = keys_at + first_n * 8 * KeysB::kRowBytes;
        const int rows = first.rows - first_row, key = score_key + first_n * 8;
        const auto dense_bias = [&](uint32_t(&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = kept(bias[m][first_n + n + i / 2][i % 2]);
        };
        const auto take = [&](int m, int h, int n, const float(&dx)[2], const bool(&is_visible)[2]) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (is_visible[e]) sum[m][first_n + n][2 * h + e] += dx[e];
        };
        const auto make_visibility = [&] {
            return TileVisibility<Tile::kRows, Tile::kKeys, kCausal>(p, first, stage.rows, run.row_tile, tile, full);
        };
        differentiate_pass<Tile, BiasKind::kDense>(
            scores, dprobs, p, RowsA(address_of(stage.rows.query), rows_at), KeysB(address_of(stage.key), pass_at),
            RowsA(address_of(stage.rows.dout), rows_at), KeysB(address_of(stage.value), pass_at), stage.rows, dense_bias,
            make_visibility, first_score_row, key, rows, take, take);
    };

    const auto store = [&](int tile) {
        if (splits == 1) {
            store_dbias_tile<Tile>(sum, p, first, run, tile);
            return;
        }
        const int64_t part = run.split * p.dbias_tiles + run.index + tile - run.key_tile;
        float* to = p.dbias_parts + part * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Tile::kScoreN; ++n)
                *reinterpret_cast<float4*>(to + (m * Tile::kScoreN + n) * Tile::kThreads * 4) =
                    make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
    };

    bool more = next();
    if (more) load(0);
    int stage = 0;
    for (int tile = run.key_tile; tile < key_end; ++tile) {
        clear(sum);
        if (more && key_tile == tile) load_bias(tile);
        while (more && key_tile == tile) {
            const bool is_full = ahead.is_full(sharer);
            wait_for_rows(smem.stages[stage].rows, first.rows - first_row);
            more = next();
            if (Smem::kStages == 2 && more) load(stage ^ 1);
#pragma unroll
            for (int pass = 0; pass < Tile::kPasses; ++pass)
                add_tile(smem.stages[stage], tile, is_full, pass * Tile::kPassN);
            if (Smem::kStages == 1) {
                __syncthreads();
                if (more) load(0);
            }
            stage = (stage + 1) % Smem::kStages;
        }
        store(tile);
    }
}

// Adds up the parts of each tile, in their order, and rounds the sum; of the main kernel's atomic sums there is one part.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads) sum_dbias_parts_kernel(const __grid_constant__ BwdArgs p) {
    const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys),
              run_length = static_cast<int>(p.dbias_run);
    const int runs = ceil_div(key_tiles, run_length), splits = static_cast<int>(p.dbias_splits);
    const int tile = blockIdx.x % key_tiles;
    const DbiasRun<Tile> run(p, (static_cast<int>(blockIdx.x) / key_tiles * runs + tile / run_length) * splits);
    const Sequence s(p, run.first_batch);
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

}  // namespace flash_dmattn::cuda::sm80
