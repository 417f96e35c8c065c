// The "recompute" kernel of dbias, for a dense bias whose shared gradient the main kernel cannot sum.
//
// A CTA owns a run of dbias tiles, one after the other. It recomputes P and dP of every contributor, the (batch, head)
// pairs that share the tile, sums dx in float32 registers and writes the sum once. This needs neither atomics nor
// memory of [B, H, Sq, Sk]. Where tiles are few, splits share the contributors, and a second kernel adds up the splits'
// sums.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/cp_async.cuh"
#include "cuda/sm80/bwd/kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// Pointers to row 0 and key 0 of one contributor.
template <typename T>
struct Contributor {
    HeadPointers<T> rows;
    const T* key;
    const T* value;
    const float* relative_bias;  // or null

    Contributor() = default;
    __device__ Contributor(const BwdArgs& p, const Sequence& s, int head) : rows(p, s, head) {
        const int kv_head = shared_head(head, p.heads, p.kv_heads);
        key = key_rows<const T>(p.key, s, kv_head);
        value = key_rows<const T>(p.value, s, kv_head);
        relative_bias = relative_bias_entries(p, s.batch, head);
    }
};

template <typename Traits>
struct BwdDbiasSharedStorage {
    struct Stage {
        QdoStage<Traits, false> qdo;
        typename Traits::KvTile key;
        typename Traits::KvTile value;
    };
    static constexpr int kStages =
        Traits::kHeadDim <= 64 ? 2 : 1;  // more CTAs per SM are worth more than a second stage
    Stage stages[kStages];
    Contributor<typename Traits::T> contributors[Traits::kThreads / 32][32];  // each warp's look-ahead window
};

// A run of dbias tiles, the n_blocks [n_block, n_block_end) of one m_block, and a split of its contributors.
template <typename Traits>
struct DbiasWorkTile {
    int m_block, n_block, n_block_end, dbias_head, split_idx;
    int first_batch;  // of the batch group
    int64_t index;    // of the first tile, among all

    __device__ DbiasWorkTile(const BwdArgs& p, int cta) {
        const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys),
                  run = static_cast<int>(p.dbias_run);
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows),
                  runs = ceil_div(num_n_blocks, run);
        const int splits = static_cast<int>(p.dbias_splits), heads = static_cast<int>(p.dbias.heads);
        split_idx = cta % splits;
        n_block = cta / splits % runs * run;
        n_block_end = min(n_block + run, num_n_blocks);
        const int rest = cta / splits / runs;
        m_block = rest % num_m_blocks;
        dbias_head = rest / num_m_blocks % heads;
        first_batch = rest / num_m_blocks / heads * static_cast<int>(p.dbias.batch_group_size);
        index = static_cast<int64_t>(rest) * num_n_blocks + n_block;
    }
};

// Calls visit(m, h, row, key) for every row of a tile that this lane holds, in the columns key + 8 n and key + 8 n + 1.
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
                                                 const BwdArgs& p, const Sequence& s,
                                                 const DbiasWorkTile<Traits>& work_tile, int n_block) {
    using T = typename Traits::T;
    const int rows = s.rows - work_tile.m_block * Traits::kRows, keys = s.keys - n_block * Traits::kKeys;
    T* to = static_cast<T*>(p.dbias.data) + shared_batch(p.dbias, s) * p.dbias.batch_stride +
            work_tile.dbias_head * p.dbias.head_stride +
            (s.first_row + work_tile.m_block * Traits::kRows) * p.dbias.row_stride + n_block * Traits::kKeys;
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

// Starts to load one contributor's stage. cp.async; commits.
template <typename Traits>
__device__ __forceinline__ void load_contributor(typename BwdDbiasSharedStorage<Traits>::Stage& to,
                                                 const SmemAddress& address_of, const BwdArgs& p, const Sequence& s,
                                                 const Contributor<typename Traits::T>& from, int first_row,
                                                 int n_block) {
    load_qdo_stage(to.qdo, address_of, p, s, from.rows, first_row, s.rows - first_row, n_block);
    const auto load_keys = [&](typename Traits::KvTile& tile, const typename Traits::T* keys, int64_t row_stride) {
        const int first_key = n_block * Traits::kKeys;
        copy_tile_async<typename Traits::KvTile, Traits::kThreads>(address_of(tile), keys, row_stride, first_key,
                                                                   s.keys - first_key, static_cast<int>(p.head_dim));
    };
    load_keys(to.key, from.key, p.key.row_stride);
    load_keys(to.value, from.value, p.value.row_stride);
    cp_async_commit();
}

// Adds dx of one contributor and pass to the sums.
template <typename Traits>
struct DxPass {
    using ScoreA = FragmentsA<typename Traits::RowsTile, Major::kK>;
    using ScoreB = FragmentsB<typename Traits::KvTile, Major::kK>;
    const BwdArgs& p;
    const Sequence& s;
    const SmemAddress& address_of;
    const int m_block;
    const int score_row, score_key;  // this warp's first row and key
    const uint32_t a_offset, b_offset;

    __device__ DxPass(const BwdArgs& p_, const Sequence& s_, const SmemAddress& address_of_, int m_block_)
        : p(p_), s(s_), address_of(address_of_), m_block(m_block_),
          score_row(warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows),
          score_key(warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys),
          a_offset(opaque(ScoreA::lane_offset(score_row, 0))), b_offset(opaque(ScoreB::lane_offset(score_key, 0))) {}

    // The columns of the pass begin at fragment first_n.
    __device__ __forceinline__ void add(float (&sum)[Traits::kScoreM][Traits::kScoreN][4],
                                        const uint32_t (&bias)[Traits::kScoreM][Traits::kScoreN][2],
                                        const typename BwdDbiasSharedStorage<Traits>::Stage& stage, int n_block,
                                        const float* relative_bias, bool is_full, int first_n) const {
        float scores[Traits::kScoreM][Traits::kPassN][4], dprobs[Traits::kScoreM][Traits::kPassN][4];
        const uint32_t pass_offset = b_offset + first_n * 8 * ScoreB::kRowBytes;
        const int rows = s.rows - m_block * Traits::kRows, key = score_key + first_n * 8;
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = opaque(bias[m][first_n + n + i / 2][i % 2]);
        };
        const auto make_visibility = [&] {
            return BlockVisibility<Traits::kRows, Traits::kKeys>(p, s, stage.qdo, m_block, n_block, is_full);
        };
        const auto adjust_scores = [&](auto& scores, auto& dprobs) {
            apply_softcap_and_relative_bias(
                scores, dprobs, p, s, relative_bias, ScoreGradient::kDx,
                [&](int i) { return m_block * Traits::kRows + score_row + i * 8 + fragment_row(); },
                [&](int n, int e) { return n_block * Traits::kKeys + key + n * 8 + fragment_col() + e; });
        };
        recompute_p_ds<Traits, BiasKind::kDense, true>(
            scores, dprobs, p, ScoreA(address_of(stage.qdo.query), a_offset),
            ScoreB(address_of(stage.key), pass_offset), ScoreA(address_of(stage.qdo.dout), a_offset),
            ScoreB(address_of(stage.value), pass_offset), stage.qdo, dense_bias, adjust_scores, make_visibility,
            score_row, key, rows);
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kPassN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[m][first_n + n][i] += dprobs[m][n][i];
    }
};

// Loads the bias of this lane's scores, two keys a register. All contributors share it.
template <typename Traits>
__device__ __forceinline__ void load_lane_bias(uint32_t (&bias)[Traits::kScoreM][Traits::kScoreN][2], const BwdArgs& p,
                                               const Sequence& s, int first_head, int first_row, int n_block) {
    using T = typename Traits::T;
    const int rows = s.rows - first_row, keys = s.keys - n_block * Traits::kKeys;
    const T* from = static_cast<const T*>(p.bias.data) + score_offset(p.bias, s, first_head, p.heads) +
                    first_row * p.bias.row_stride + n_block * Traits::kKeys * p.bias.col_stride;
    if (is_full_and_aligned<Traits>(from, p.bias, rows, keys)) {
        for_each_row<Traits>([&](int m, int h, int row, int key) {
            const T* at = from + static_cast<uint32_t>(row) * p.bias.row_stride + key;
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n) bias[m][n][h] = *reinterpret_cast<const uint32_t*>(at + n * 8);
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
}

// Stores dbias, or with several splits this split's sum in float32.
template <typename Traits>
__device__ __forceinline__ void store_sum(const float (&sum)[Traits::kScoreM][Traits::kScoreN][4], const BwdArgs& p,
                                          const Sequence& s, const DbiasWorkTile<Traits>& work_tile, int splits,
                                          int n_block) {
    if (splits == 1) {
        store_dbias_tile<Traits>(sum, p, s, work_tile, n_block);
        return;
    }
    const int64_t partial = work_tile.split_idx * p.dbias_tiles + work_tile.index + n_block - work_tile.n_block;
    float* to = p.dbias_partials + partial * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
    for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
        for (int n = 0; n < Traits::kScoreN; ++n)
            *reinterpret_cast<float4*>(to + (m * Traits::kScoreN + n) * Traits::kThreads * 4) =
                make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.ctas_per_sm)
    bwd_dbias_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if constexpr (!Traits::kIsUsed) return;
    using T = typename Traits::T;
    using SharedStorage = BwdDbiasSharedStorage<Traits>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    SharedStorage& smem = *reinterpret_cast<SharedStorage*>(shared_memory);
    const SmemAddress address_of(shared_memory);

    const DbiasWorkTile<Traits> work_tile(p, blockIdx.x);
    const Sequence s(p, work_tile.first_batch);  // all contributors have its length
    const int first_row = work_tile.m_block * Traits::kRows, last_row = min(first_row + Traits::kRows, s.rows) - 1;
    if (first_row >= s.rows || work_tile.n_block * Traits::kKeys >= s.keys) return;
    const int n_block_end = min(work_tile.n_block_end, ceil_div(s.keys, Traits::kKeys));

    // A batch element's heads follow each other, so that K and V of a GQA group are read together.
    const int heads = static_cast<int>(p.heads) / static_cast<int>(p.dbias.heads);
    const int first_head = work_tile.dbias_head * heads;
    const int splits = static_cast<int>(p.dbias_splits);
    const int64_t contributors = heads * p.dbias.batch_group_size;
    const int contributor_begin = static_cast<int>(contributors * work_tile.split_idx / splits);
    const int contributor_end = static_cast<int>(contributors * (work_tile.split_idx + 1) / splits);
    const int visible_keys = s.keys_of(last_row, p.is_causal);  // of the m_block's last row

    // Moves to the next contributor that the mask leaves active in n_block, then to the next n_block.
    auto& window = smem.contributors[warp_id()];
    BlockMaskIterator ahead{contributor_begin};
    int n_block = work_tile.n_block, contributor = 0, window_begin = -1;
    const auto next = [&] {
        while (ahead.pending == 0) {
            if (ahead.next >= contributor_end) {
                ahead.next = contributor_begin;
                ++n_block;
            }
            if (n_block >= n_block_end || n_block * Traits::kKeys >= visible_keys) return false;
            const bool is_new = window_begin != ahead.next;
            window_begin = ahead.next;
            if (is_new) __syncwarp();
            ahead.test_next_32(contributor_end, [&](int candidate, bool& is_empty, bool& is_full) {
                const int head = first_head + candidate % heads;
                Sequence other = s;
                other.batch += candidate / heads;
                if (is_new) window[lane_id()] = Contributor<T>(p, other, head);
                if (!has_mask(p)) return;
                const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p, other, head);
                const auto summary = masks.of(first_row, last_row, n_block);
                is_empty = summary.empty;
                is_full = summary.full;
            });
            if (is_new) __syncwarp();
        }
        contributor = ahead.pop();
        return true;
    };
    const auto load = [&](int stage) {
        load_contributor<Traits>(smem.stages[stage], address_of, p, s, window[contributor], first_row, n_block);
    };

    uint32_t bias[Traits::kScoreM][Traits::kScoreN][2];
    float sum[Traits::kScoreM][Traits::kScoreN][4] = {};
    const DxPass<Traits> dx_pass(p, s, address_of, work_tile.m_block);
    bool more = next();
    if (more) load(0);
    int stage = 0;
    for (int current = work_tile.n_block; current < n_block_end; ++current) {
        clear(sum);
        if (more && n_block == current) load_lane_bias<Traits>(bias, p, s, first_head, first_row, current);
        while (more && n_block == current) {
            const bool is_full = ahead.is_full(contributor);
            const float* const relative_bias = window[contributor].relative_bias;
            wait_for_qdo(smem.stages[stage].qdo, s.rows - first_row);
            more = next();
            if (SharedStorage::kStages == 2 && more) load(stage ^ 1);
#pragma unroll
            for (int pass = 0; pass < Traits::kPasses; ++pass)
                dx_pass.add(sum, bias, smem.stages[stage], current, relative_bias, is_full, pass * Traits::kPassN);
            if (SharedStorage::kStages == 1) {
                __syncthreads();
                if (more) load(0);
            }
            stage = (stage + 1) % SharedStorage::kStages;
        }
        store_sum<Traits>(sum, p, s, work_tile, splits, current);
    }
}

// Adds up the splits of each dbias tile in their order and rounds the sum. The main kernel's atomic sums are one split.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads) sum_dbias_partials_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys),
              run_length = static_cast<int>(p.dbias_run);
    const int runs = ceil_div(num_n_blocks, run_length), splits = static_cast<int>(p.dbias_splits);
    const int n_block = blockIdx.x % num_n_blocks;
    const DbiasWorkTile<Traits> work_tile(
        p, (static_cast<int>(blockIdx.x) / num_n_blocks * runs + n_block / run_length) * splits);
    const Sequence s(p, work_tile.first_batch);
    if (work_tile.m_block * Traits::kRows >= s.rows || n_block * Traits::kKeys >= s.keys) return;
    float sum[Traits::kScoreM][Traits::kScoreN][4];
    clear(sum);
    for (int64_t split = 0; split < splits; ++split) {
        const float* from =
            p.dbias_partials + (split * p.dbias_tiles + blockIdx.x) * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kScoreN; ++n) {
                const float4 x =
                    *reinterpret_cast<const float4*>(from + (m * Traits::kScoreN + n) * Traits::kThreads * 4);
                sum[m][n][0] += x.x, sum[m][n][1] += x.y, sum[m][n][2] += x.z, sum[m][n][3] += x.w;
            }
    }
    store_dbias_tile<Traits>(sum, p, s, work_tile, n_block);
}

}  // namespace flash_dmattn::cuda::sm80
