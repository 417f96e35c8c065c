// The backward's main kernel: dK, dV of one tile of keys, and that tile's part of dQ and of the bias's gradient.
//
// A block owns a tile of keys of one key/value head and visits the tiles of query rows that see it, of every query head
// of the group. dK and dV stay in registers. dQ is summed in global memory in float32, in the order in which registers
// hold it (see dquery_accum in params.h), so that every addition is 16 bytes a thread and 512 a warp.
#pragma once

#include "bwd_dx_exchange.cuh"
#include "bwd_scores.cuh"
#include "bwd_scratch.cuh"

namespace flash_dmattn::cuda {

template <typename Tile, BiasKind kBias>
struct BwdSmem {
    static constexpr bool kKeyBias = kBias == BiasKind::kKey;
    // A dense bias lies where P will be written, so its next tile needs a place of its own.
    static constexpr int kProbStages = kBias == BiasKind::kDense ? 2 : 1;
    typename Tile::KeysTile key;
    typename Tile::KeysTile value;
    RowStage<Tile, kKeyBias> rows[2];
    typename Tile::PairsTile probs[kProbStages];
    typename Tile::PairsTile dscores;
    HeadRows<typename Tile::T> heads[Tile::kThreads / 32];  // each warp's own: no warp waits for another to find it
    float column_sums[Tile::kKeys];
    uint32_t seen[Tile::kWords];  // keys that any row sees
    Sequence sequence;
    int ticket;
};

// Whether a block's shared memory holds what it exchanges, too: 227 KiB on compute capability 9.0.
template <typename Tile>
constexpr bool kCanExchangeDx =
    Tile::kPasses == 1 && sizeof(BwdSmem<Tile, BiasKind::kDense>) + sizeof(DxExchangeSmem<Tile>) <= 227 * 1024;

// Which tiles of rows a block visits: head after head, the tiles that causality and the mask leave a pair of, ascending.
// Warps look ahead together, 32 tiles at a time, one a lane. The blocks of a cluster, one a batch element, visit the same
// tiles: those that a mask leaves a pair of for any of them.
template <typename Tile, bool kCausal>
class RowTileCursor {
public:
    int head, row_tile;
    bool mask_full;  // the mask hides nothing of the tile

    __device__ RowTileCursor(const BwdParams& p, const Sequence& s, int key_tile, int first_head, int heads)
        : head(first_head), p_(p), s_(s), key_tile_(key_tile), last_head_(first_head + heads - 1) {
        begin_ = kCausal ? s.causal_begin(key_tile * Tile::kKeys) / Tile::kRows : 0;
        end_ = ceil_div(s.rows, Tile::kRows);
        next_window_ = begin_;
    }

    // Moves to the next tile; false where there is none.
    __device__ __forceinline__ bool next() {
        while (pending_ == 0) {
            if (next_window_ >= end_) {
                if (head == last_head_) return false;
                ++head;
                next_window_ = begin_;
                if (next_window_ >= end_) return false;
            }
            look_ahead();
        }
        const int lane = __ffs(pending_) - 1;
        pending_ &= pending_ - 1;
        row_tile = next_window_ - 32 + lane;
        mask_full = full_ >> lane & 1;
        return true;
    }

private:
    __device__ __forceinline__ void look_ahead() {
        const int tile = next_window_ + lane_id();
        bool empty = tile >= end_, full = true;
        if (!empty && p_.packed_mask.bits != nullptr) {
            const auto summary = summary_of(s_, tile);
            full = summary.full;
            // In deterministic mode every block takes its turn at every tile.
            empty = summary.empty && !p_.deterministic;
            Sequence other = s_;
            for (int i = 1; empty && i < cluster_size(); ++i) {
                other.batch = (s_.batch + i) % cluster_size();
                empty = summary_of(other, tile).empty;
            }
        }
        pending_ = __ballot_sync(~0u, !empty);
        full_ = __ballot_sync(~0u, full);
        next_window_ += 32;
    }

    __device__ auto summary_of(const Sequence& s, int tile) const {
        const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p_, s, head);
        const int first = tile * Tile::kRows;
        return masks.of(first, min(first + Tile::kRows, s.rows) - 1, key_tile_);
    }

    const BwdParams& p_;
    const Sequence& s_;
    int key_tile_, last_head_, begin_, end_, next_window_;
    uint32_t pending_ = 0, full_ = 0;
};

__device__ __forceinline__ void reduce_add(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(to + i, x[i]);
#endif
}

// In deterministic mode the blocks of one head add to a tile of dQ in the order of their keys.
__device__ __forceinline__ void wait_for_turn(const int32_t* turns, int turn) {
    if (threadIdx.x == 0) {
        int32_t current;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(current) : "l"(turns) : "memory");
        } while (current != turn);
    }
    __syncthreads();
}
__device__ __forceinline__ void end_turn(int32_t* turns) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

// A tile to rows of global memory, 16 bytes a thread where they are aligned.
template <int kThreads, typename Tile, typename T>
__device__ __forceinline__ void copy_tile_out(const Tile& tile, T* to, int64_t row_stride, int rows, int cols) {
    constexpr int kChunks = Tile::kCols / 8;
    const bool aligned = row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < Tile::kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, col = i % kChunks * 8;
        if (row >= rows || col >= cols) continue;
        const T* from = tile.data + Tile::offset(row, i % kChunks);
        T* at = to + row * row_stride + col;
        if (aligned && col + 8 <= cols) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int j = 0; j < min(cols - col, 8); ++j) at[j] = from[j];
        }
    }
}

template <typename Tile, BiasKind kBias, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kSizes.blocks_per_sm)
    bwd_kernel(const __grid_constant__ BwdParams p) {
    using T = typename Tile::T;
    using Smem = BwdSmem<Tile, kBias>;
    constexpr bool kKeyBias = Smem::kKeyBias;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const SharedMemory address_of(shared_memory);

    // Whether the batch elements sum the gradient of the bias that they share, in a cluster.
    const bool exchanges_dx = kCanExchangeDx<Tile> && kBias == BiasKind::kDense && cluster_size() > 1;
    const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys);
    const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.heads / p.kv_heads);
    int key_tile, kv_head, batch;
    if (p.deterministic) {
        // Whoever waits for the blocks of lower keys holds a higher ticket than they: they have begun.
        if (threadIdx.x == 0) smem.ticket = atomicAdd(p.dquery_turns + dquery_tiles_total(p), 1);
        __syncthreads();
        kv_head = smem.ticket % kv_heads;
        batch = smem.ticket / kv_heads % static_cast<int>(p.batch);
        key_tile = smem.ticket / kv_heads / static_cast<int>(p.batch);
    } else if (exchanges_dx) {
        batch = cluster_rank();
        key_tile = blockIdx.x / cluster_size() % key_tiles;
        kv_head = blockIdx.x / cluster_size() / key_tiles;
    } else {
        key_tile = blockIdx.x % key_tiles;
        kv_head = blockIdx.x / key_tiles % kv_heads;
        batch = blockIdx.x / key_tiles / kv_heads;
    }
    // In shared memory, where the compiler leaves it: of what it would compute from it once and for all, each pointer
    // would cost the main loop two registers.
    if (threadIdx.x == 0) smem.sequence = Sequence(p, batch);
    __syncthreads();
    const Sequence& s = smem.sequence;
    const int first_key = key_tile * Tile::kKeys;
    if (first_key >= s.keys) return;
    const int first_head = kv_head * group;
    const bool dense_dbias = kBias == BiasKind::kDense && p.dbias.data != nullptr && dbias_in_main_kernel(p);
    auto& exchange_smem = *reinterpret_cast<DxExchangeSmem<Tile>*>(shared_memory + sizeof(Smem));
    const DxExchange<Tile> exchange(address_of, exchange_smem);
    const bool key_dbias = kKeyBias && p.dbias.data != nullptr;

    const int warp = warp_id(), lane = lane_id();
    // Where this warp's part begins: of S and dP, of dK and dV, of dQ.
    const int score_row = warp / Tile::kScoreKeyWarps * Tile::kScoreRows;
    const int score_key = warp % Tile::kScoreKeyWarps * Tile::kScoreKeys;
    const int dkv_key = warp / Tile::kDkvColWarps * Tile::kDkvKeys, dkv_col = warp % Tile::kDkvColWarps * 16;
    const int dq_row = warp / Tile::kDqColWarps * Tile::kDqRows, dq_col = warp % Tile::kDqColWarps * 16;
    constexpr int kDkvColStep = Tile::kDkvColWarps * 16, kDqColStep = Tile::kDqColWarps * 16;

    RowTileCursor<Tile, kCausal> cursor(p, s, key_tile, first_head, group);
    float dkey[Tile::kDkvM][Tile::kDkvN][4], dvalue[Tile::kDkvM][Tile::kDkvN][4];
    clear(dkey);
    clear(dvalue);
    float column_sums[kKeyBias ? Tile::kScoreN : 1][2] = {};

    // Keys that no row sees may hold anything.
    const auto find_seen_keys = [&] {
        const PackedMask& mask = p.packed_mask;
        if (threadIdx.x < Tile::kWords) smem.seen[threadIdx.x] = mask.bits == nullptr ? ~0u : 0;
        __syncthreads();
        if (mask.bits == nullptr) return;
        const int row_tiles = ceil_div(s.rows, Tile::kRows);
        for (int i = threadIdx.x; i < row_tiles * group; i += Tile::kThreads) {
            const int first_row = i % row_tiles * Tile::kRows;
            const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p, s, first_head + i / row_tiles);
            const auto summary = masks.of(first_row, min(first_row + Tile::kRows, s.rows) - 1, key_tile);
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w)
                if (summary.columns[w] != 0) atomicOr(&smem.seen[w], summary.columns[w]);
        }
        __syncthreads();
    };
    const auto load_keys = [&](typename Tile::KeysTile& tile, const RowsView& view) {
        const T* from = static_cast<const T*>(view.data) + key_offset(view, s, kv_head) + first_key * view.row_stride;
        copy_rows_async<Tile::kThreads>(tile, static_cast<int>(p.head_dim), [&](int key) -> const T* {
            const bool is_seen = first_key + key < s.keys && smem.seen[key / 32] >> (key % 32) & 1;
            return is_seen ? from + key * view.row_stride : nullptr;
        });
    };

    int loaded_head = -1, key_bias_head = -1;
    float key_bias = 0;  // of key threadIdx.x
    const auto load_rows = [&](int stage) {
        auto& head = smem.heads[warp];
        if (cursor.head != loaded_head) {
            loaded_head = cursor.head;
            __syncwarp();
            if (lane == 0) head = HeadRows<T>(p, s, loaded_head);
            __syncwarp();
        }
        load_row_stage(smem.rows[stage], address_of, p, head, s.rows, cursor.row_tile, key_tile);
        if constexpr (kBias == BiasKind::kDense) {
            load_bias<Tile>(smem.probs[stage], address_of, p, s, head, cursor.row_tile, key_tile);
        } else if (kKeyBias && threadIdx.x < Tile::kKeys) {
            const int bias_head = shared_head(cursor.head, p.heads, p.bias.heads);
            if (bias_head != key_bias_head) {
                key_bias_head = bias_head;
                key_bias = load_key_bias(p, s, cursor.head, first_key + threadIdx.x);
            }
            smem.rows[stage].key_bias[threadIdx.x] = key_bias;
        }
        cp_async_commit();
    };

    const auto dbias_rows = [&](int head, int row_tile) {
        return static_cast<T*>(p.dbias.data) + (p.dbias.batches > 1 ? s.batch * p.dbias.batch_stride : 0) +
               head * p.dbias.head_stride +
               static_cast<uint32_t>(s.first_row + row_tile * Tile::kRows) * p.dbias.row_stride + first_key;
    };
    // Tiles that the cursor leaves out have a gradient, too: 0. The blocks of a cluster take turns.
    const auto clear_unvisited_dbias = [&] {
        RowTileCursor<Tile, kCausal> visited(p, s, key_tile, first_head, group);
        bool more = visited.next();
        for (int head = first_head; head < first_head + group; ++head) {
            for (int tile = 0; tile < ceil_div(s.rows, Tile::kRows); ++tile) {
                if (more && visited.head == head && visited.row_tile == tile) {
                    more = visited.next();
                    continue;
                }
                if (tile % cluster_size() != cluster_rank()) continue;
                T* to = dbias_rows(head, tile);
                for (int i = threadIdx.x; i < Tile::kRows * Tile::kKeys; i += Tile::kThreads) {
                    const int row = i / Tile::kKeys, key = i % Tile::kKeys;
                    if (tile * Tile::kRows + row < s.rows && first_key + key < s.keys)
                        to[row * p.dbias.row_stride + key] = T(0.f);
                }
            }
        }
    };

    // The columns' sums over all rows of this head, added up over the lanes and warps that share a column.
    const auto store_key_dbias = [&](int head) {
        if (threadIdx.x < Tile::kKeys) smem.column_sums[threadIdx.x] = 0;
        __syncthreads();
        for (int row_warp = 0; row_warp < Tile::kSizes.score_row_warps; ++row_warp) {
            if (warp / Tile::kScoreKeyWarps == row_warp) {
#pragma unroll
                for (int n = 0; n < (kKeyBias ? Tile::kScoreN : 1); ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float sum = column_sums[n][e];
#pragma unroll
                        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                        if (lane < 4) smem.column_sums[score_key + n * 8 + lane * 2 + e] += sum;
                        column_sums[n][e] = 0;
                    }
            }
            __syncthreads();
        }
        const int key = first_key + threadIdx.x;
        if (threadIdx.x < Tile::kKeys && key < s.keys) {
            float* to = static_cast<float*>(p.dbias.data) + pair_offset(p.dbias, s, head, p.heads);
            to[key * p.dbias.col_stride] = smem.column_sums[threadIdx.x];
        }
        __syncthreads();
    };

    // P and dS of the tile's rows from score_row on, rounded, to shared memory.
    const auto scores_to_gradients = [&](int stage, typename Tile::PairsTile& probs, int head, int row_tile,
                                         bool mask_full, int score_row) {
        const auto& rows_stage = smem.rows[stage];
        float scores[Tile::kPassM][Tile::kScoreN][4], dprobs[Tile::kPassM][Tile::kScoreN][4];
        clear(scores);
        clear(dprobs);
        using QueryA = OperandA<typename Tile::RowsTile, false>;
        using KeyB = OperandB<typename Tile::KeysTile, false>;
        multiply_add<T, Tile::kHeadDim>(scores, QueryA(address_of(rows_stage.query), score_row, 0),
                                        KeyB(address_of(smem.key), score_key, 0));
        multiply_add<T, Tile::kHeadDim>(dprobs, QueryA(address_of(rows_stage.dout), score_row, 0),
                                        KeyB(address_of(smem.value), score_key, 0));

        const int rows = s.rows - row_tile * Tile::kRows;
        const TileVisibility<Tile, kCausal> visibility(p, s, rows_stage.mask, row_tile, key_tile);
        const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
        const Blocks<typename Tile::PairsTile, BlockOrder::kBelowFirst> bias_blocks(address_of(probs), score_row,
                                                                                    score_key);
        const auto dense_bias = [&](uint32_t(&to)[4], int m, int n) {
            bias_blocks.template load<false>(to, m * 16, n * 8);
        };
        const auto sum_columns = [&](int, int, int n, int e, float dx, bool is_visible) {
            if (kKeyBias) column_sums[n][e] += is_visible ? dx : 0.f;
        };
        if (softcap > 0) {
            // ds is not dx here, which goes straight to the gradient of a dense bias.
            const auto take = [&](int m, int h, int n, int e, float dx, bool is_visible) {
                sum_columns(m, h, n, e, dx, is_visible);
                const int row = score_row + m * 16 + h * 8 + lane / 4, key = score_key + n * 8 + lane % 4 * 2 + e;
                if (!dense_dbias || row >= rows || first_key + key >= s.keys) return;
                dbias_rows(head, row_tile)[row * p.dbias.row_stride + key] = T(is_visible ? dx : 0.f);
            };
            differentiate<Tile, kBias, true, true>(scores, dprobs, rows_stage, dense_bias, visibility, score_row,
                                                   score_key, rows, scale, softcap, take);
        } else if (mask_full && visibility.full()) {
            differentiate<Tile, kBias, false, false>(scores, dprobs, rows_stage, dense_bias, visibility, score_row,
                                                     score_key, rows, scale, softcap, sum_columns);
        } else {
            differentiate<Tile, kBias, true, false>(scores, dprobs, rows_stage, dense_bias, visibility, score_row,
                                                    score_key, rows, scale, softcap, sum_columns);
        }
        if constexpr (kCanExchangeDx<Tile>) {
            if (exchanges_dx) exchange.send(dprobs, stage);
        }
        store_rounded<typename Tile::PairsTile, T>(scores, address_of(probs), score_row, score_key);
        store_rounded<typename Tile::PairsTile, T>(dprobs, address_of(smem.dscores), score_row, score_key);
    };

    const auto add_dvalue = [&](const auto& rows_stage, const typename Tile::PairsTile& probs) {
        multiply_add<T, Tile::kRows, kDkvColStep>(
            dvalue, OperandA<typename Tile::PairsTile, true>(address_of(probs), 0, dkv_key),
            OperandB<typename Tile::RowsTile, true>(address_of(rows_stage.dout), 0, dkv_col));
    };
    const auto add_dkey = [&](const auto& rows_stage) {
        multiply_add<T, Tile::kRows, kDkvColStep>(
            dkey, OperandA<typename Tile::PairsTile, true>(address_of(smem.dscores), 0, dkv_key),
            OperandB<typename Tile::RowsTile, true>(address_of(rows_stage.query), 0, dkv_col));
    };
    const auto add_dquery = [&](int head, int row_tile) {
        float dquery[Tile::kDqM][Tile::kDqN][4];
        clear(dquery);
        multiply_add<T, Tile::kKeys, kDqColStep>(
            dquery, OperandA<typename Tile::PairsTile, false>(address_of(smem.dscores), dq_row, 0),
            OperandB<typename Tile::KeysTile, true>(address_of(smem.key), 0, dq_col));
        const int64_t tile = dquery_tile<Tile::kRows>(p, s, head, row_tile);
        float* to = p.dquery_accum + tile * Tile::kRows * Tile::kHeadDim + threadIdx.x * 4;
        if (p.deterministic) wait_for_turn(p.dquery_turns + tile, key_tile);
#pragma unroll
        for (int m = 0; m < Tile::kDqM; ++m)
#pragma unroll
            for (int n = 0; n < Tile::kDqN; ++n)
                reduce_add(to + (m * Tile::kDqN + n) * Tile::kThreads * 4, dquery[m][n]);
        if (p.deterministic) end_turn(p.dquery_turns + tile);
    };
    const auto store_dbias = [&](int head, int row_tile) {
        copy_tile_out<Tile::kThreads>(smem.dscores, dbias_rows(head, row_tile), p.dbias.row_stride,
                                      s.rows - row_tile * Tile::kRows, s.keys - first_key);
    };
    const auto store_exchanged_dbias = [&](int stage, int head, int row_tile) {
        T* to = dbias_rows(head, row_tile);
        const int rows = s.rows - row_tile * Tile::kRows, keys = s.keys - first_key;
        const bool plain = is_plain<Tile>(to, p.dbias, rows, keys);
        exchange.sum(stage, [&](int m, int n, const float(&dx)[4]) {
            const int row = score_row + m * 16 + lane / 4, key = score_key + n * 8 + lane % 4 * 2;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                T* at = to + static_cast<uint32_t>(row + h * 8) * p.dbias.row_stride + key;
                if (row + h * 8 < rows) store_pair(at, plain, keys - key, dx[2 * h], dx[2 * h + 1]);
            }
        });
    };
    const auto store_keys = [&](const auto& acc, typename Tile::KeysTile& staging, const RowsView& view, float scale) {
        store_rounded<typename Tile::KeysTile, T, kDkvColStep>(acc, address_of(staging), dkv_key, dkv_col, scale);
        __syncthreads();
        T* to = static_cast<T*>(view.data) + key_offset(view, s, kv_head) + first_key * view.row_stride;
        copy_tile_out<Tile::kThreads>(staging, to, view.row_stride, s.keys - first_key, static_cast<int>(p.head_dim));
    };

    if (exchanges_dx) exchange.begin();
    if (dense_dbias || exchanges_dx) clear_unvisited_dbias();
    find_seen_keys();
    load_keys(smem.key, p.key);
    load_keys(smem.value, p.value);
    bool more = cursor.next();
    if (more) load_rows(0);
    int summed_head = first_head;  // the head that the column sums are of

    for (int stage = 0; more; stage ^= 1) {
        const int head = cursor.head, row_tile = cursor.row_tile;
        const bool mask_full = cursor.mask_full;
        wait_for_rows(smem.rows[stage], s.rows - row_tile * Tile::kRows);
        if (exchanges_dx) exchange.await_parts();
        more = cursor.next();
        if (more) load_rows(stage ^ 1);
        if (key_dbias && head != summed_head) {
            if (shared_head(head, p.heads, p.dbias.heads) != shared_head(summed_head, p.heads, p.dbias.heads))
                store_key_dbias(summed_head);
            summed_head = head;
        }

        auto& probs = smem.probs[Smem::kProbStages == 2 ? stage : 0];
#pragma unroll
        for (int pass = 0; pass < Tile::kPasses; ++pass)
            scores_to_gradients(stage, probs, head, row_tile, mask_full, score_row + pass * Tile::kPassM * 16);
        __syncthreads();
        add_dvalue(smem.rows[stage], probs);
        add_dquery(head, row_tile);
        add_dkey(smem.rows[stage]);
        if (dense_dbias && p.softcap == 0) store_dbias(head, row_tile);
        if (exchanges_dx) store_exchanged_dbias(stage, head, row_tile);
    }
    if (exchanges_dx) exchange.end();

    if (key_dbias) store_key_dbias(summed_head);
    cp_async_wait<0>();
    __syncthreads();
    store_keys(dkey, smem.key, p.dkey, static_cast<float>(p.softmax_scale));
    store_keys(dvalue, smem.value, p.dvalue, 1.f);
}

}  // namespace flash_dmattn::cuda
