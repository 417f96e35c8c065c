// The gradient of a dense bias that batch elements or query heads share, where the main kernel cannot sum it: dx summed
// over all that share an entry.
//
// A block makes a run of tiles of the gradient, one after the other: it recomputes P and dP of every (batch element,
// head) that shares a tile, keeps the sum in float32 registers and writes it once. No atomics, and nothing of
// [B, H, Sq, Sk] in memory. Where tiles are few, the sharers are split among blocks, whose sums a second kernel adds up.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/sm80/bwd/kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// Where the rows and the keys of one that shares a tile begin.
template <typename T>
struct Contributor {
    HeadPointers<T> rows;
    const T* key;
    const T* value;

    Contributor() = default;
    __device__ Contributor(const BwdArgs& p, const Sequence& s, int head) : rows(p, s, head) {
        const int kv_head = shared_head(head, p.heads, p.kv_heads);
        key = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head);
        value = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head);
    }
};

template <typename Traits>
struct BwdDbiasSharedStorage {
    struct Stage {
        QdoStage<Traits, false> rows;
        typename Traits::KeysTile key;
        typename Traits::KeysTile value;
    };
    static constexpr int kStages = Traits::kHeadDim <= 64 ? 2 : 1;  // as many blocks as registers allow come first
    Stage stages[kStages];
    Contributor<typename Traits::T> contributors[Traits::kThreads / 32][32];  // that each warp looks ahead to
};

// Which tiles of the gradient a block makes: [n_block, key_end) of a row of tiles.
template <typename Traits>
struct DbiasWorkTile {
    int m_block, n_block, key_end, dbias_head, split;
    int first_batch;  // of those that share the gradient's
    int64_t index;    // of the first tile, among all

    __device__ DbiasWorkTile(const BwdArgs& p, int block) {
        const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys),
                  run = static_cast<int>(p.dbias_run);
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows),
                  runs = ceil_div(num_n_blocks, run);
        const int splits = static_cast<int>(p.dbias_splits), heads = static_cast<int>(p.dbias.heads);
        split = block % splits;
        n_block = block / splits % runs * run;
        key_end = min(n_block + run, num_n_blocks);
        const int above = block / splits / runs;
        m_block = above % num_m_blocks;
        dbias_head = above / num_m_blocks % heads;
        first_batch = above / num_m_blocks / heads * static_cast<int>(p.dbias.batch_group_size);
        index = static_cast<int64_t>(above) * num_n_blocks + n_block;
    }
};

// Calls visit(m, h, row, key) for every row that this lane holds of a tile; its pairs of neighbouring keys begin at key + 8 n.
template <typename Traits, typename Visit>
__device__ __forceinline__ void for_each_row(const Visit& visit) {
    const int row = warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows + fragment_row();
    const int key = warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys + fragment_col();
#pragma unroll
    for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) visit(m, h, row + m * 16 + h * 8, key);
}

template <typename Traits>
__device__ __forceinline__ void store_dbias_tile(const float (&sum)[Traits::kScoreM][Traits::kScoreN][4],
                                                 const BwdArgs& p, const Sequence& s, const DbiasWorkTile<Traits>& run,
                                                 int n_block) {
    using T = typename Traits::T;
    const int rows = s.rows - run.m_block * Traits::kRows, keys = s.keys - n_block * Traits::kKeys;
    T* to = static_cast<T*>(p.dbias.data) + shared_batch(p.dbias, s) * p.dbias.batch_stride +
            run.dbias_head * p.dbias.head_stride + (s.first_row + run.m_block * Traits::kRows) * p.dbias.row_stride +
            n_block * Traits::kKeys;
    if (is_full_and_aligned<Traits>(to, p.dbias, rows, keys)) {
        for_each_row<Traits>([&](int m, int h, int row, int key) {
            T* at = to + static_cast<uint32_t>(row) * p.dbias.row_stride + key;
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n)
                *reinterpret_cast<uint32_t*>(at + n * 8) = pack<T>(sum[m][n][2 * h], sum[m][n][2 * h + 1]);
        });
        return;
    }
    for_each_row<Traits>([&](int m, int h, int row, int key) {
        if (row >= rows) return;
        T* at = to + row * p.dbias.row_stride;
#pragma unroll
        for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (key + n * 8 + e < keys) at[key + n * 8 + e] = T(sum[m][n][2 * h + e]);
    });
}

template <typename Traits, bool kCausal>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.blocks_per_sm)
    bwd_dbias_kernel(const __grid_constant__ BwdArgs p) {
    if constexpr (!Traits::kIsUsed) return;
    using T = typename Traits::T;
    using SharedStorage = BwdDbiasSharedStorage<Traits>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_memory);
    const SmemAddress address_of(shared_memory);

    const DbiasWorkTile<Traits> run(p, blockIdx.x);
    const Sequence first(p, run.first_batch);  // all that share a tile have its length
    const int first_row = run.m_block * Traits::kRows, last_row = min(first_row + Traits::kRows, first.rows) - 1;
    if (first_row >= first.rows || run.n_block * Traits::kKeys >= first.keys) return;
    const int key_end = min(run.key_end, ceil_div(first.keys, Traits::kKeys));

    // The sharers: a batch element's heads one after the other, so that K and V of a group are read together.
    const int heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads), first_head = run.dbias_head * heads;
    const int splits = static_cast<int>(p.dbias_splits);
    const int64_t contributors = heads * p.dbias.batch_group_size;
    const int contributor_begin = static_cast<int>(contributors * run.split / splits);
    const int contributor_end = static_cast<int>(contributors * (run.split + 1) / splits);
    // Keys that causality leaves to the tile's last row.
    const int visible_keys = kCausal ? first.causal_end(last_row) : first.keys;

    // What is to be added next: of a tile, the sharers that the mask leaves a pair of. Each warp keeps where those lie that
    // it looks ahead to.
    auto& window = smem.contributors[warp_id()];
    BlockMaskIterator ahead{contributor_begin};
    int n_block = run.n_block, contributor = 0, found_window = -1;
    const auto next = [&] {
        while (ahead.pending == 0) {
            if (ahead.next >= contributor_end) {
                ahead.next = contributor_begin;
                ++n_block;
            }
            if (n_block >= key_end || n_block * Traits::kKeys >= visible_keys) return false;
            const bool is_new = found_window != ahead.next;
            found_window = ahead.next;
            if (is_new) __syncwarp();
            ahead.look(contributor_end, [&](int candidate, bool& is_empty, bool& is_full) {
                const int head = first_head + candidate % heads;
                Sequence s = first;
                s.batch += candidate / heads;
                if (is_new) window[lane_id()] = Contributor<T>(p, s, head);
                if (!has_mask(p)) return;
                const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p, s, head);
                const auto summary = masks.of(first_row, last_row, n_block);
                is_empty = summary.empty;
                is_full = summary.full;
            });
            if (is_new) __syncwarp();
        }
        contributor = ahead.take();
        return true;
    };
    const auto load = [&](int stage) {
        auto& to = smem.stages[stage];
        const Contributor<T>& from = window[contributor];
        load_qdo_stage(to.rows, address_of, p, first, from.rows, first_row, first.rows - first_row, n_block);
        const auto load_keys = [&](typename Traits::KeysTile& tile, const T* keys, int64_t row_stride) {
            const int first_key = n_block * Traits::kKeys;
            copy_tile_async<typename Traits::KeysTile, Traits::kThreads>(
                address_of(tile), keys, row_stride, first_key, first.keys - first_key, static_cast<int>(p.head_dim));
        };
        load_keys(to.key, from.key, p.key.row_stride);
        load_keys(to.value, from.value, p.value.row_stride);
        cp_async_commit();
    };

    uint32_t bias[Traits::kScoreM][Traits::kScoreN][2];
    const auto load_bias = [&](int tile) {
        const int rows = first.rows - first_row, keys = first.keys - tile * Traits::kKeys;
        const T* from = static_cast<const T*>(p.bias.data) + score_offset(p.bias, first, first_head, p.heads) +
                        first_row * p.bias.row_stride + tile * Traits::kKeys * p.bias.col_stride;
        if (is_full_and_aligned<Traits>(from, p.bias, rows, keys)) {
            for_each_row<Traits>([&](int m, int h, int row, int key) {
                const T* at = from + static_cast<uint32_t>(row) * p.bias.row_stride + key;
#pragma unroll
                for (int n = 0; n < Traits::kScoreN; ++n)
                    bias[m][n][h] = *reinterpret_cast<const uint32_t*>(at + n * 8);
            });
            return;
        }
        for_each_row<Traits>([&](int m, int h, int row, int key) {
            const auto load = [&](int k) {
                const bool in_sequence = row < rows && k < keys;
                return in_sequence ? to_float(from[row * p.bias.row_stride + k * p.bias.col_stride]) : 0.f;
            };
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n) bias[m][n][h] = pack<T>(load(key + n * 8), load(key + n * 8 + 1));
        });
    };

    float sum[Traits::kScoreM][Traits::kScoreN][4] = {};
    using RowsA = FragmentsA<typename Traits::RowsTile, false>;
    using KeysB = FragmentsB<typename Traits::KeysTile, false>;
    const int first_score_row = warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows;
    const int score_key = warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys;
    const uint32_t rows_at = opaque(RowsA::lane_offset(first_score_row, 0));
    const uint32_t keys_at = opaque(KeysB::lane_offset(score_key, 0));
    const auto add_tile = [&](const typename SharedStorage::Stage& stage, int tile, bool full, int first_n) {
        float scores[Traits::kScoreM][Traits::kPassN][4], dprobs[Traits::kScoreM][Traits::kPassN][4];
        const uint32_t pass_at = keys_at + first_n * 8 * KeysB::kRowBytes;
        const int rows = first.rows - first_row, key = score_key + first_n * 8;
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = opaque(bias[m][first_n + n + i / 2][i % 2]);
        };
        const auto take = [&](int m, int h, int n, const float (&dx)[2], const bool (&is_visible)[2]) {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (is_visible[e]) sum[m][first_n + n][2 * h + e] += dx[e];
        };
        const auto make_visibility = [&] {
            return BlockVisibility<Traits::kRows, Traits::kKeys, kCausal>(p, first, stage.rows, run.m_block, tile,
                                                                          full);
        };
        recompute_p_ds<Traits, BiasKind::kDense>(
            scores, dprobs, p, RowsA(address_of(stage.rows.query), rows_at), KeysB(address_of(stage.key), pass_at),
            RowsA(address_of(stage.rows.dout), rows_at), KeysB(address_of(stage.value), pass_at), stage.rows,
            dense_bias, make_visibility, first_score_row, key, rows, take, take);
    };

    const auto store = [&](int tile) {
        if (splits == 1) {
            store_dbias_tile<Traits>(sum, p, first, run, tile);
            return;
        }
        const int64_t part = run.split * p.dbias_tiles + run.index + tile - run.n_block;
        float* to = p.dbias_parts + part * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n)
                *reinterpret_cast<float4*>(to + (m * Traits::kScoreN + n) * Traits::kThreads * 4) =
                    make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
    };

    bool more = next();
    if (more) load(0);
    int stage = 0;
    for (int tile = run.n_block; tile < key_end; ++tile) {
        clear(sum);
        if (more && n_block == tile) load_bias(tile);
        while (more && n_block == tile) {
            const bool is_full = ahead.is_full(contributor);
            wait_for_qdo(smem.stages[stage].rows, first.rows - first_row);
            more = next();
            if (SharedStorage::kStages == 2 && more) load(stage ^ 1);
#pragma unroll
            for (int pass = 0; pass < Traits::kPasses; ++pass)
                add_tile(smem.stages[stage], tile, is_full, pass * Traits::kPassN);
            if (SharedStorage::kStages == 1) {
                __syncthreads();
                if (more) load(0);
            }
            stage = (stage + 1) % SharedStorage::kStages;
        }
        store(tile);
    }
}

// Adds up the parts of each tile, in their order, and rounds the sum; of the main kernel's atomic sums there is one part.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads) sum_dbias_parts_kernel(const __grid_constant__ BwdArgs p) {
    const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys),
              run_length = static_cast<int>(p.dbias_run);
    const int runs = ceil_div(num_n_blocks, run_length), splits = static_cast<int>(p.dbias_splits);
    const int tile = blockIdx.x % num_n_blocks;
    const DbiasWorkTile<Traits> run(p,
                                    (static_cast<int>(blockIdx.x) / num_n_blocks * runs + tile / run_length) * splits);
    const Sequence s(p, run.first_batch);
    if (run.m_block * Traits::kRows >= s.rows || tile * Traits::kKeys >= s.keys) return;
    float sum[Traits::kScoreM][Traits::kScoreN][4];
    clear(sum);
    for (int64_t split = 0; split < splits; ++split) {
        const float* from =
            p.dbias_parts + (split * p.dbias_tiles + blockIdx.x) * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n) {
                const float4 x =
                    *reinterpret_cast<const float4*>(from + (m * Traits::kScoreN + n) * Traits::kThreads * 4);
                sum[m][n][0] += x.x, sum[m][n][1] += x.y, sum[m][n][2] += x.z, sum[m][n][3] += x.w;
            }
    }
    store_dbias_tile<Traits>(sum, p, s, run, tile);
}

}  // namespace flash_dmattn::cuda::sm80
