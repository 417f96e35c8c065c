// The backward's main kernel: dK, dV of one tile of keys, and that tile's part of dQ and of the bias's gradient.
//
// A block owns a tile of keys of one key/value head and visits the tiles of query rows that see it, of every query head
// of the group. dK and dV stay in registers. dQ is summed in global memory in float32, in the order in which registers
// hold it (see dquery_accum in plan.h), so that every addition is 16 bytes a thread and 512 a warp.
#pragma once

#include "bwd_dx_exchange.cuh"
#include "bwd_scores.cuh"
#include "bwd_scratch.cuh"
#include "row_tile_cursor.cuh"

namespace flash_dmattn::cuda::sm80 {

// The corners from which a thread reads or writes the tiles of the products. They are found once and kept in shared
// memory: found anew, they would cost a tenth of the instructions, and registers are short.
enum LaneOffset {
    kScoreRows,   // of Q and dO, for S and dP
    kScoreKeys,   // of K and V
    kScorePairs,  // of the bias, P and dS, where S and dP become P and dS
    kDkvPairs,    // of P and dS, for dK and dV
    kDkvRows,     // of Q and dO
    kDqPairs,     // of dS, for dQ
    kDqKeys,      // of K
    kLaneOffsets
};

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
    uint16_t lane_offsets[kLaneOffsets][Tile::kThreads];  // of each thread's part of the products, in bytes
    // Each warp's own: no warp waits for another to find them.
    HeadRows<typename Tile::T> head_rows[Tile::kThreads / 32];
    HeadBias<typename Tile::T> head_bias[Tile::kThreads / 32];
    RowTilePlace places[Tile::kThreads / 32];
    float column_sums[Tile::kKeys];
    Sequence sequence;
    int ticket;
};

// Whether a block's shared memory holds what it exchanges, too: 227 KiB on compute capability 9.0.
template <typename Tile>
constexpr bool kCanExchangeDx =
    !Tile::kIsSmall && sizeof(BwdSmem<Tile, BiasKind::kDense>) + sizeof(DxExchangeSmem<Tile>) <= 227 * 1024;

// In deterministic mode the blocks of one head add to a tile of dQ in the order of their keys.
__device__ __forceinline__ void wait_for_turn(const int32_t* turns, int turn) {
    if (threadIdx.x == 0) {
        while (load_acquire(turns) != turn) {
        }
    }
    __syncthreads();
}
__device__ __forceinline__ void end_turn(int32_t* turns) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

template <typename Tile, BiasKind kBias, bool kCausal>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kSizes.blocks_per_sm)
    bwd_kernel(const __grid_constant__ BwdArgs p) {
    if constexpr (!Tile::kIsUsed) return;
    using T = typename Tile::T;
    using Smem = BwdSmem<Tile, kBias>;
    constexpr bool kKeyBias = Smem::kKeyBias;
    constexpr int kPasses = Tile::template kPassesWith<kBias>, kPassN = Tile::kScoreN / kPasses;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Smem& smem = *reinterpret_cast<Smem*>(shared_memory);
    const SharedMemory address_of(shared_memory);

    // Asked of a constant whenever it matters: kept, the answer would be spilled.
    const auto dense_dbias_is = [&](DenseDbias what) {
        return kBias == BiasKind::kDense && (what != DenseDbias::kExchanged || kCanExchangeDx<Tile>) &&
               kept(static_cast<uint32_t>(p.dense_dbias)) == static_cast<uint32_t>(what);
    };
    const int key_tiles = ceil_div(static_cast<int>(p.seqlen_k), Tile::kKeys);
    const int kv_heads = static_cast<int>(p.kv_heads), group = static_cast<int>(p.heads / p.kv_heads);
    int key_tile, kv_head, batch;
    if (p.deterministic) {
        // Whoever waits for the blocks of lower keys holds a higher ticket than they: they have begun.
        if (threadIdx.x == 0) smem.ticket = atomicAdd(p.dquery_turns + dquery_tiles_total(p, p), 1);
        __syncthreads();
        kv_head = smem.ticket % kv_heads;
        batch = smem.ticket / kv_heads % static_cast<int>(p.batch);
        key_tile = smem.ticket / kv_heads / static_cast<int>(p.batch);
    } else if (dense_dbias_is(DenseDbias::kExchanged)) {
        batch = blockIdx.x % static_cast<int>(p.batch);  // its rank in the cluster, too
        key_tile = blockIdx.x / static_cast<int>(p.batch) % key_tiles;
        kv_head = blockIdx.x / static_cast<int>(p.batch) / key_tiles;
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
    auto& exchange_smem = *reinterpret_cast<DxExchangeSmem<Tile>*>(shared_memory + sizeof(Smem));
    const DxExchange<Tile> exchange(address_of, exchange_smem, static_cast<int>(p.batch));
    const bool key_dbias = kKeyBias && p.dbias.data != nullptr;

    const int warp = warp_id(), lane = lane_id();
    // Where this warp's part of S and dP begins.
    const int first_score_row = warp / Tile::kScoreKeyWarps * Tile::kScoreRows;
    const int first_score_key = warp % Tile::kScoreKeyWarps * Tile::kScoreKeys;
    constexpr int kDkvColStep = Tile::kDkvColWarps * 16, kDqColStep = Tile::kDqColWarps * 16;

    using ScoreQuery = OperandA<typename Tile::RowsTile, false>;
    using ScoreKey = OperandB<typename Tile::KeysTile, false>;
    using Pairs = Blocks<typename Tile::PairsTile, BlockOrder::kBelowFirst>;
    using DkvPairs = OperandA<typename Tile::PairsTile, true>;
    using DkvRows = OperandB<typename Tile::RowsTile, true>;
    using DqPairs = OperandA<typename Tile::PairsTile, false>;
    using DqKeys = OperandB<typename Tile::KeysTile, true>;
    using Keys = Blocks<typename Tile::KeysTile, BlockOrder::kBelowFirst>;
    const int dkv_key = warp / Tile::kDkvColWarps * Tile::kDkvKeys, dkv_col = warp % Tile::kDkvColWarps * 16;
    {
        const int dq_row = warp / Tile::kDqColWarps * Tile::kDqRows, dq_col = warp % Tile::kDqColWarps * 16;
        const auto keep = [&](LaneOffset which, uint32_t offset) { smem.lane_offsets[which][threadIdx.x] = offset; };
        keep(kScoreRows, ScoreQuery::lane_offset(first_score_row, 0));
        keep(kScoreKeys, ScoreKey::lane_offset(first_score_key, 0));
        keep(kScorePairs, Pairs::lane_offset(first_score_row, first_score_key));
        keep(kDkvPairs, DkvPairs::lane_offset(0, dkv_key));
        keep(kDkvRows, DkvRows::lane_offset(0, dkv_col));
        keep(kDqPairs, DqPairs::lane_offset(dq_row, 0));
        keep(kDqKeys, DqKeys::lane_offset(0, dq_col));
    }
    const uint32_t lane_offsets = kept(address_of(smem.lane_offsets) + threadIdx.x * 2);
    const auto lane_offset = [&](LaneOffset which) {
        return load_shared_u16(lane_offsets + which * Tile::kThreads * 2);
    };

    float dkey[Tile::kDkvM][Tile::kDkvN][4], dvalue[Tile::kDkvM][Tile::kDkvN][4];
    clear(dkey);
    clear(dvalue);
    float column_sums[kKeyBias ? Tile::kScoreN : 1][2] = {};

    // Keys that no row sees, for the mask or their bias, may hold anything: they are not read. A warp looks at 32 tiles at
    // a time, one a lane.
    uint32_t seen[Tile::kWords];
    const auto find_seen_keys = [&] {
        const bool is_masked = has_mask(p);
#pragma unroll
        for (int w = 0; w < Tile::kWords; ++w) seen[w] = is_masked ? 0 : ~0u;
        const int row_tiles = is_masked ? ceil_div(s.rows, Tile::kRows) : 0;
        for (int head = first_head; head < first_head + group; ++head) {
            const MaskSummaries<Tile::kRows, Tile::kKeys> masks(p, s, head);
            for (int tile = lane; tile < row_tiles; tile += 32) {
                const int first_row = tile * Tile::kRows;
                const auto summary = masks.of(first_row, min(first_row + Tile::kRows, s.rows) - 1, key_tile);
#pragma unroll
                for (int w = 0; w < Tile::kWords; ++w) seen[w] |= summary.columns[w];
            }
        }
#pragma unroll
        for (int w = 0; w < Tile::kWords; ++w) seen[w] = __reduce_or_sync(~0u, seen[w]);
        if constexpr (kKeyBias) {
#pragma unroll
            for (int w = 0; w < Tile::kWords; ++w) {
                bool unhidden = false;
                for (int head = first_head; head < first_head + group; ++head)
                    unhidden |= load_key_bias<T>(p, s, head, first_key + w * 32 + lane) != -kInfinity;
                seen[w] &= __ballot_sync(~0u, unhidden);
            }
        }
    };
    const auto load_keys = [&](typename Tile::KeysTile& tile, const RowsView& view) {
        const T* from = static_cast<const T*>(view.data) + key_offset(view, s, kv_head) + first_key * view.row_stride;
        copy_rows_async<Tile::kThreads>(tile, static_cast<int>(p.head_dim), [&](int key) -> const T* {
            uint32_t word = seen[0];
#pragma unroll
            for (int w = 1; w < Tile::kWords; ++w) word = key / 32 == w ? seen[w] : word;
            return first_key + key < s.keys && word >> (key % 32) & 1 ? from + key * view.row_stride : nullptr;
        });
    };

    float key_bias = 0;  // of key threadIdx.x
    const auto find_head = [&](int head) {
        __syncwarp();
        if (lane == 0) smem.head_rows[warp] = HeadRows<T>(p, s, head);
        if (kBias == BiasKind::kDense && lane == 1) smem.head_bias[warp] = HeadBias<T>(p, s, head);
        __syncwarp();
        if (kKeyBias && threadIdx.x < Tile::kKeys) key_bias = load_key_bias<T>(p, s, head, first_key + threadIdx.x);
    };
    const auto load_rows = [&](int stage, int row_tile) {
        load_row_stage(smem.rows[stage], address_of, p, s, smem.head_rows[warp], row_tile, key_tile);
        if constexpr (kBias == BiasKind::kDense)
            load_bias<Tile>(smem.probs[stage], address_of, p, s, smem.head_bias[warp], row_tile, key_tile);
        if (kKeyBias && threadIdx.x < Tile::kKeys) smem.rows[stage].key_bias[threadIdx.x] = key_bias;
        cp_async_commit();
    };

    const auto dbias_rows = [&](int head, int row_tile) {
        return static_cast<T*>(p.dbias.data) + (p.dbias.batches > 1 ? s.batch * p.dbias.batch_stride : 0) +
               head * p.dbias.head_stride +
               static_cast<uint32_t>(s.first_row + row_tile * Tile::kRows) * p.dbias.row_stride + first_key;
    };
    // Tiles that the cursor leaves out have a gradient, too: 0. Batch elements that share it take turns.
    const auto clear_unvisited_dbias = [&] {
        if (!kCausal && !has_mask(p)) return;
        const int sharers = dense_dbias_is(DenseDbias::kExchanged) ? static_cast<int>(p.batch) : 1;
        RowTileCursor<Tile, kCausal> visited(smem.places[warp], p, s, key_tile, first_head);
        bool more = visited.next();
        for (int head = first_head; head < first_head + group; ++head) {
            for (int tile = 0; tile < ceil_div(s.rows, Tile::kRows); ++tile) {
                if (more && visited.head() == head && visited.row_tile() == tile) {
                    more = visited.next();
                    continue;
                }
                if (sharers > 1 && tile % sharers != batch) continue;
                T* to = dbias_rows(head, tile);
                for (int i = kept(threadIdx.x); i < Tile::kRows * Tile::kKeys; i += Tile::kThreads) {
                    const int row = i / Tile::kKeys, key = i % Tile::kKeys;
                    if (tile * Tile::kRows + row < s.rows && first_key + key < s.keys)
                        to[row * p.dbias.row_stride + key] = T(0.f);
                }
            }
        }
    };

    // To the sums of the tile, in the order in which registers hold it.
    const auto add_dbias = [&](const float(&dx)[Tile::kScoreM][kPassN][4], int head, int row_tile, int first_n) {
        const int batch = p.dbias.batches > 1 || p.cu_seqlens_q != nullptr ? s.batch : 0;
        const int heads = static_cast<int>(p.dbias.heads), row_tiles = ceil_div(static_cast<int>(p.seqlen_q), Tile::kRows);
        const int tile_row = (batch * heads + shared_head(head, p.heads, heads)) * row_tiles + row_tile;
        const int64_t tile = static_cast<int64_t>(tile_row) * key_tiles + key_tile;
        float* to = p.dbias_parts + tile * Tile::kRows * Tile::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kPassN; ++n)
                reduce_add(to + (m * Tile::kScoreN + first_n + n) * Tile::kThreads * 4, dx[m][n]);
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
                        if (lane < 4) smem.column_sums[first_score_key + n * 8 + lane * 2 + e] += sum;
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

    // P and dS of one pass over the tile, of this warp's columns of blocks from first_n on, rounded, to shared memory.
    const auto scores_to_gradients = [&](int stage, typename Tile::PairsTile& probs, int head, int row_tile,
                                         bool mask_full, int first_n) {
        const auto& rows_stage = smem.rows[stage];
        const int score_key = first_score_key + first_n * 8;
        float scores[Tile::kScoreM][kPassN][4], dprobs[Tile::kScoreM][kPassN][4];
        const uint32_t rows_at = lane_offset(kScoreRows);
        const uint32_t keys_at = lane_offset(kScoreKeys) + first_n * 8 * ScoreKey::kRowBytes;
        const int rows = s.rows - row_tile * Tile::kRows;
        const uint32_t pairs_at = lane_offset(kScorePairs);
        const Pairs prob_blocks = Pairs(address_of(probs), pairs_at).from(0, first_n * 8);  // of the bias, before
        const auto dense_bias = [&](uint32_t(&to)[4], int m, int n) {
            prob_blocks.template load<false>(to, m * 16, n * 8);
        };
        const auto sum_columns = [&](int, int, int n, const float(&dx)[2], const bool(&is_visible)[2]) {
            if constexpr (kKeyBias) {
#pragma unroll
                for (int e = 0; e < 2; ++e) column_sums[first_n + n][e] += is_visible[e] ? dx[e] : 0.f;
            }
        };
        // ds is not dx where there is a softcap; dx then goes straight to the gradient of a dense bias.
        const int lane = kept(lane_id());
        const auto take_capped = [&](int m, int h, int n, const float(&dx)[2], const bool(&is_visible)[2]) {
            sum_columns(m, h, n, dx, is_visible);
            const int row = first_score_row + m * 16 + h * 8 + fragment_row(lane);
            const int key = score_key + n * 8 + fragment_col(lane);
            if (!dense_dbias_is(DenseDbias::kByEntry) || row >= rows) return;
            T* to = dbias_rows(head, row_tile) + row * p.dbias.row_stride + key;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (first_key + key + e < s.keys) to[e] = T(is_visible[e] ? dx[e] : 0.f);
        };
        const auto make_visibility = [&] {
            return TileVisibility<Tile::kRows, Tile::kKeys, kCausal>(p, s, rows_stage, row_tile, key_tile, mask_full);
        };
        differentiate_pass<Tile, kBias>(
            scores, dprobs, p, ScoreQuery(address_of(rows_stage.query), rows_at), ScoreKey(address_of(smem.key), keys_at),
            ScoreQuery(address_of(rows_stage.dout), rows_at), ScoreKey(address_of(smem.value), keys_at), rows_stage,
            dense_bias, make_visibility, first_score_row, score_key, rows, sum_columns, take_capped);
        if (dense_dbias_is(DenseDbias::kAtomic)) add_dbias(dprobs, head, row_tile, first_n);
        if (dense_dbias_is(DenseDbias::kExchanged)) exchange.send(dprobs, first_n, s.batch, stage);
        store_rounded<T>(scores, prob_blocks);
        store_rounded<T>(dprobs, Pairs(address_of(smem.dscores), pairs_at).from(0, first_n * 8));
    };

    const auto add_dvalue = [&](const auto& rows_stage, const typename Tile::PairsTile& probs) {
        multiply_add<T, Tile::kRows, kDkvColStep>(dvalue, DkvPairs(address_of(probs), lane_offset(kDkvPairs)),
                                                  DkvRows(address_of(rows_stage.dout), lane_offset(kDkvRows)));
    };
    const auto add_dkey = [&](const auto& rows_stage) {
        multiply_add<T, Tile::kRows, kDkvColStep>(dkey, DkvPairs(address_of(smem.dscores), lane_offset(kDkvPairs)),
                                                  DkvRows(address_of(rows_stage.query), lane_offset(kDkvRows)));
    };
    const auto add_dquery = [&](int head, int row_tile) {
        float dquery[Tile::kDqM][Tile::kDqN][4];
        clear(dquery);
        multiply_add<T, Tile::kKeys, kDqColStep>(dquery, DqPairs(address_of(smem.dscores), lane_offset(kDqPairs)),
                                                 DqKeys(address_of(smem.key), lane_offset(kDqKeys)));
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
        T* tile = dbias_rows(head, row_tile);
        const int first_block = exchange.first_block(s.batch), lane = kept(lane_id());
        const int row = first_score_row + first_block / Tile::kScoreN * 16 + fragment_row(lane);
        const int key = first_score_key + first_block % Tile::kScoreN * 8;
        const int rows = s.rows - row_tile * Tile::kRows, keys = s.keys - first_key;
        const bool plain = is_plain<Tile, 4>(tile, p.dbias, rows, keys);
        T* at = tile + row * p.dbias.row_stride + key;
        exchange.sum(stage, [&](int i, const float(&a)[4], const float(&b)[4]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x[2][2] = {{a[2 * h], a[2 * h + 1]}, {b[2 * h], b[2 * h + 1]}};
                T* to = at + h * 8 * p.dbias.row_stride + i * 8;
                if (plain) {
                    // Two lanes trade, so that each has four neighbours: the even one of block i, the odd one of i + 1.
                    const uint32_t in_a = pack<T>(x[0][0], x[0][1]), in_b = pack<T>(x[1][0], x[1][1]);
                    const bool odd = lane % 2;
                    const uint32_t other = __shfl_xor_sync(~0u, odd ? in_a : in_b, 1);
                    *reinterpret_cast<uint2*>(to + lane % 2 * 8 + lane % 4 / 2 * 4) =
                        odd ? make_uint2(other, in_b) : make_uint2(in_a, other);
                } else if (row + h * 8 < rows) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int pair = i * 8 + e / 2 * 8 + fragment_col(lane) + e % 2;
                        if (key + pair < keys) at[h * 8 * p.dbias.row_stride + pair] = T(x[e / 2][e % 2]);
                    }
                }
            }
        });
    };
    const auto store_keys = [&](const auto& acc, typename Tile::KeysTile& staging, const RowsView& view, float scale) {
        store_rounded<T, kDkvColStep>(acc, Keys(address_of(staging), Keys::lane_offset(dkv_key, dkv_col)), scale);
        __syncthreads();
        T* to = static_cast<T*>(view.data) + key_offset(view, s, kv_head) + first_key * view.row_stride;
        copy_tile_out<Tile::kThreads>(staging, to, view.row_stride, s.keys - first_key, static_cast<int>(p.head_dim));
    };

    if (dense_dbias_is(DenseDbias::kExchanged)) exchange.begin();
    if (dense_dbias_is(DenseDbias::kByEntry) || dense_dbias_is(DenseDbias::kExchanged)) clear_unvisited_dbias();
    RowTileCursor<Tile, kCausal> cursor(smem.places[warp], p, s, key_tile, first_head);
    bool more = cursor.next();
    if (more) {
        find_head(cursor.head());
        load_rows(0, cursor.row_tile());
    }
    find_seen_keys();
    load_keys(smem.key, p.key);
    load_keys(smem.value, p.value);
    cp_async_commit();

    for (int stage = 0; more; stage ^= 1) {
        const int head = cursor.head(), row_tile = cursor.row_tile();
        const bool mask_full = cursor.mask_full();
        wait_for_rows(smem.rows[stage], s.rows - row_tile * Tile::kRows);
        if (dense_dbias_is(DenseDbias::kExchanged)) exchange.await_parts();
        more = cursor.next();
        const bool ends_head = !more || cursor.head() != head;
        if (more) {
            if (ends_head) find_head(cursor.head());
            load_rows(stage ^ 1, cursor.row_tile());
        }

        auto& probs = smem.probs[Smem::kProbStages == 2 ? stage : 0];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            scores_to_gradients(stage, probs, head, row_tile, mask_full, pass * kPassN);
        __syncthreads();
        add_dvalue(smem.rows[stage], probs);
        add_dquery(head, row_tile);
        add_dkey(smem.rows[stage]);
        if (dense_dbias_is(DenseDbias::kByEntry) && p.softcap == 0) store_dbias(head, row_tile);
        if (dense_dbias_is(DenseDbias::kExchanged)) store_exchanged_dbias(stage, head, row_tile);
        if (key_dbias && ends_head) {
            const auto sums_of = [&](int head) { return shared_head(head, p.heads, p.dbias.heads); };
            if (!more || sums_of(cursor.head()) != sums_of(head)) store_key_dbias(head);
        }
    }
    if (dense_dbias_is(DenseDbias::kExchanged)) exchange.end();

    cp_async_wait<0>();
    __syncthreads();
    store_keys(dkey, smem.key, p.dkey, static_cast<float>(p.softmax_scale));
    store_keys(dvalue, smem.value, p.dvalue, 1.f);
}

}  // namespace flash_dmattn::cuda::sm80
