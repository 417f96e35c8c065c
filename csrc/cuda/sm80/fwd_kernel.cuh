// The forward for compute capability 8.0 and up: one block owns a tile of query rows and goes over the keys once.
#pragma once

#include "../common/online_softmax.cuh"
#include "../common/pairs.cuh"
#include "../common/sequence.cuh"
#include "../common/smem_tile.cuh"
#include "../common/tile_scan.cuh"
#include "fwd_config.h"

namespace flash_dmattn::cuda {

// How the work is cut among blocks.
struct FwdSchedule {
    int row_tiles;  // of a head, or of `pack` heads
    int heads;      // H / pack
    int batch;
    int pack;       // query heads that share a tile: row r of it is row r / pack of head r % pack
    bool batch_first;  // neighbouring blocks differ in their batch, else in their row tile
    float scale;
    float to_log2;  // makes exponents of 2 of what the softmax sees
    // Scores stay unscaled where nothing is added to them and their order is that of the scaled ones.
    bool raw_scores;
    float softcap;
    bool bias_aligned;  // of a dense bias: rows of contiguous keys, 16-byte aligned
};

template <typename T, int kHeadDim, BiasKind kBias, typename Shape>
class FwdKernel {
public:
    static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kBlocks = Shape::kBlocks;
    static constexpr int kKeyWarps = Shape::kKeyWarps, kThreads = Shape::kRowWarps * kKeyWarps * 32;
    static constexpr int kWarpRows = kRows / Shape::kRowWarps, kWarpKeys = kKeys / kKeyWarps;
    static constexpr int kMTiles = kWarpRows / 16, kNTiles = kWarpKeys / 8, kOutTiles = kHeadDim / 8;
    static constexpr int kWords = kKeys / 32, kWarpWords = kWarpKeys / 32;
    // By how many steps operands are read from shared memory ahead of the products: where few warps share a multiprocessor,
    // they do not hide that time for each other.
    static constexpr int kAhead = kBlocks * kThreads <= 256 ? 1 : 0;
    static_assert(kRows <= kThreads && kKeys <= kThreads, "one thread copies one row's mask, or one key's bias");

    using QueryTile = SmemTile<T, kRows, kHeadDim>;
    using KeyTile = SmemTile<T, kKeys, kHeadDim>;
    using BiasTile = SmemTile<T, kRows, kKeys>;

    // What a block works on. It stays in shared memory, since the main loop needs the registers.
    struct Work {
        Sequence s;
        int first_head;
        int first_row;  // of the tile, counted in rows of `pack` heads
        int split;
    };

    struct SharedMemory {
        QueryTile query;  // at the end, out
        KeyTile key;
        KeyTile value;
        // Of the current tile of keys:
        std::conditional_t<kBias == BiasKind::kDense, BiasTile, float[kKeys]> bias;
        alignas(16) uint32_t mask[kRows][kWords];
        uint32_t bias_visible[kWords];  // keys whose bias is not -inf
        int row_end[kRows];             // a row sees keys below this by causality and length
        float max[kKeyWarps][kRows];    // at the end, of the warps that share rows
        float sum[kKeyWarps][kRows];
        Work work;
    };

    // smem.work has been written.
    __device__ FwdKernel(const FwdParams& p, const FwdSchedule& schedule, SharedMemory& smem)
        : p_(p), schedule_(schedule), smem_(smem), warp_row_(warp_id() / kKeyWarps * kWarpRows),
          warp_key_(warp_id() % kKeyWarps * kWarpKeys),
          query_lane_(kept(smem.query.lane_down() + warp_row_ * kRowBytes)),
          key_lane_(kept(smem.key.lane_across() + warp_key_ * kRowBytes)),
          value_lane_(kept(smem.value.lane_down() + warp_key_ * kRowBytes)),
          key_copy_(kept(KeyCopy::lane_address(smem.key))) {
        if constexpr (kBias == BiasKind::kDense) bias_copy_ = kept(BiasCopy::lane_address(smem.bias));
        const Sequence& s = smem.work.s;
        const int first_head = smem.work.first_head;
        const int kv_head = shared_head(first_head, p.heads, p.kv_heads), row = KeyCopy::first_row();
        key_ = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head) + row * p.key.row_stride;
        value_ = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head) + row * p.value.row_stride;
        if (kBias != BiasKind::kNone) {
            const int64_t offset = pair_offset(p.bias, s, first_head, p.heads);
            bias_ = static_cast<const char*>(p.bias.data) + offset * (p.bias.dtype == DataType::kFloat32 ? 4 : 2);
            if (kBias == BiasKind::kDense && !Shape::kPacksHeads)
                bias_ += query_row(BiasCopy::first_row()) * p.bias.row_stride * sizeof(T);
        }
        if (mask_by_row()) {
            const int mask_row = min(query_row(min(static_cast<int>(threadIdx.x), kRows - 1)), s.rows - 1);
            const PackedMask& mask = p.packed_mask;
            mask_row_ = mask.bits + s.batch * mask.bits_batch_stride +
                        shared_head(first_head, p.heads, mask.heads) * mask.bits_head_stride +
                        (s.first_row + mask_row) * mask.bits_row_stride;
        }
    }

    __device__ void run() {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out_[m][n][i] = 0;

        // The lane's tile of keys before any of its pairs is read.
        const auto summarize = [&](int tile) {
            const Work& work = smem_.work;
            const int low = query_row(0), high = min(query_row(kRows - 1), work.s.rows - 1);
            const MaskSummaries<kRows, kKeys> mask(p_, work.s, work.first_head);
            auto summary = mask.of(low, high, tile);
            summary.full &= (tile + 1) * kKeys <= work.s.keys_of(low, p_.is_causal);
            const int end = work.s.keys_of(high, p_.is_causal) - tile * kKeys;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.columns[w] &= bits_below(end, w);
            return summary;
        };
        const int last_row = min(query_row(kRows - 1), sequence().rows - 1);
        const unsigned tiles = ceil_div(sequence().keys_of(last_row, p_.is_causal), kKeys);
        const unsigned splits = static_cast<unsigned>(p_.splits), split = smem_.work.split;
        TileScan<kKeys, decltype(summarize)> tile(tiles * split / splits, tiles * (split + 1) / splits, summarize);
        const bool idle = query_row(warp_row_) >= sequence().rows;  // this warp has no rows and only copies

        load_query();
        bool more = tile.next();
        if (more) {
            load_key(tile);
            load_pairs(tile);
            store_key_bias();
        }
        cp_async_commit();
        for (int row = threadIdx.x; row < kRows; row += kThreads)
            smem_.row_end[row] =
                query_row(row) < sequence().rows ? sequence().keys_of(query_row(row), p_.is_causal) : 0;

        while (more) {
            float scores[kMTiles][kNTiles][4] = {};
            cp_async_wait<0>();
            __syncthreads();  // query, key, mask and bias have come; the last tile's value is free
            load_value(tile);
            cp_async_commit();
            if (!idle) {
                multiply_query_key(scores);
                apply_pairs(scores, tile);
            }
            cp_async_wait<0>();
            __syncthreads();  // value has come; key, mask and bias are free
            more = tile.next();
            if (more) {
                load_key(tile);
                load_pairs(tile);
            }
            cp_async_commit();
            if (!idle) {
                softmax_.update(scores, out_, schedule_.to_log2);
                add_probs_value(scores);
            }
            if (more) store_key_bias();
        }
        cp_async_wait<0>();
        __syncthreads();  // query has come even where no tile was visited; its memory is free
        if constexpr (kKeyWarps > 1) merge_key_warps();
        if (warp_key_ > 0) return;
        if (p_.splits > 1) {
            store_split();
        } else {
            store_out();
        }
    }

private:
    using QueryCopy = RowCopy<kThreads, QueryTile>;
    using KeyCopy = RowCopy<kThreads, KeyTile>;
    using BiasCopy = RowCopy<kThreads, BiasTile>;
    static constexpr int kRowBytes = QueryTile::kPanelCols * sizeof(T);  // of a panel
    static_assert(KeyCopy::kRowsAtOnce <= 32, "a step's keys lie in one word of a tile's columns");

    __device__ const Sequence& sequence() const { return smem_.work.s; }
    __device__ bool has_mask() const { return p_.packed_mask.bits != nullptr; }
    // Else a tile's columns say all that the mask does.
    __device__ bool mask_by_row() const { return has_mask() && p_.packed_mask.bits_row_stride != 0; }
    // Row of the sequence, and its head, of a row of the tile.
    __device__ int query_row(int row) const {
        return Shape::kPacksHeads ? (smem_.work.first_row + row) / schedule_.pack : smem_.work.first_row + row;
    }
    __device__ int query_head(int row) const {
        return smem_.work.first_head + (Shape::kPacksHeads ? (smem_.work.first_row + row) % schedule_.pack : 0);
    }

    __device__ void load_query() {
        const T* query = static_cast<const T*>(p_.query.data) + query_offset(p_.query, sequence(), 0);
        QueryCopy::start(QueryCopy::lane_address(smem_.query), static_cast<int>(p_.head_dim), [&](int i) {
            const int row = QueryCopy::first_row() + i * QueryCopy::kRowsAtOnce;
            const int64_t at = query_row(row) * p_.query.row_stride + query_head(row) * p_.query.head_stride;
            return RowSource<T>{query + at, query_row(row) < sequence().rows};
        });
    }

    // Keys that no row sees are not read, and neither are their values.
    template <typename Tile>
    __device__ __forceinline__ void load_key(const Tile& tile) {
        load_visible(key_copy_, key_, p_.key.row_stride, tile, [](int) { return ~0u; });
    }
    template <typename Tile>
    __device__ __forceinline__ void load_value(const Tile& tile) {
        load_visible(key_copy_ + sizeof(KeyTile), value_, p_.value.row_stride, tile,
                     [&](int word) { return kBias == BiasKind::kKey ? smem_.bias_visible[word] : ~0u; });
    }
    // from: this thread's first row of the first tile of keys.
    template <typename Tile, typename Visible>
    __device__ __forceinline__ void load_visible(uint32_t to, const T* from, int64_t row_stride,
                                                 const Tile& tile, const Visible& visible) {
        uint32_t bits[kWords];  // the lowest of each is this thread's first row's
#pragma unroll
        for (int w = 0; w < kWords; ++w) bits[w] = (tile.columns(w) & visible(w)) >> KeyCopy::first_row();
        from += tile.index() * kKeys * row_stride;
        KeyCopy::start(to, static_cast<int>(p_.head_dim), [&](int i) {
            const int row = i * KeyCopy::kRowsAtOnce;
            const RowSource<T> source{from, (bits[row / 32] >> row % 32 & 1) != 0};
            from += KeyCopy::kRowsAtOnce * row_stride;
            return source;
        });
    }

    // Starts to fetch what is added to the scores and what hides them.
    template <typename Tile>
    __device__ __forceinline__ void load_pairs(const Tile& tile) {
        if (mask_by_row() && !tile.full() && threadIdx.x < kRows)
            cp_async<kWords * 4>(smem_address(smem_.mask[threadIdx.x]), mask_row_ + tile.index() * kWords);
        if constexpr (kBias == BiasKind::kKey) {
            const int key = tile.index() * kKeys + threadIdx.x;
            key_bias_ = 0;
            if (threadIdx.x < kKeys && key < sequence().keys) {
                const int64_t at = key * p_.bias.col_stride;
                key_bias_ = p_.bias.dtype == DataType::kFloat32 ? reinterpret_cast<const float*>(bias_)[at]
                                                                : to_float(reinterpret_cast<const T*>(bias_)[at]);
            }
        }
        if constexpr (kBias == BiasKind::kDense) load_dense_bias(tile.index() * kKeys);
    }

    __device__ __forceinline__ void load_dense_bias(int first_key) {
        const T* bias = reinterpret_cast<const T*>(bias_) + first_key * p_.bias.col_stride;
        const int64_t row_stride = p_.bias.row_stride;
        // What stands beyond the keys of a sequence is hidden; here the tensor's end matters alone.
        const int keys = static_cast<int>(p_.seqlen_k) - first_key;
        const bool aligned = schedule_.bias_aligned && (keys >= kKeys || keys % 8 == 0);
        if (aligned && !Shape::kPacksHeads) {
            const int rows_left = sequence().rows - query_row(BiasCopy::first_row());
            BiasCopy::start(bias_copy_, keys, [&](int i) {
                const RowSource<T> source{bias, i * BiasCopy::kRowsAtOnce < rows_left};
                bias += BiasCopy::kRowsAtOnce * row_stride;
                return source;
            });
        } else if (aligned) {
            BiasCopy::start(bias_copy_, keys, [&](int i) {
                const int row = query_row(BiasCopy::first_row() + i * BiasCopy::kRowsAtOnce);
                return RowSource<T>{bias + row * row_stride, row < sequence().rows};
            });
        } else {
            const int first = Shape::kPacksHeads ? 0 : query_row(BiasCopy::first_row());  // that `bias` points to
#pragma unroll 1
            for (int at = threadIdx.x; at < kRows * kKeys; at += kThreads) {
                const int col = at % kKeys, row = query_row(at / kKeys);
                const bool valid = row < sequence().rows && first_key + col < sequence().keys;
                const int64_t offset = (row - first) * row_stride + col * p_.bias.col_stride;
                smem_.bias.at(at / kKeys, col) = valid ? bias[offset] : T(0.f);
            }
        }
    }

    // The key bias travels through a register, whatever its stride and dtype, while the last tile is computed.
    __device__ void store_key_bias() {
        if constexpr (kBias == BiasKind::kKey) {
            if (threadIdx.x >= kKeys) return;
            smem_.bias[threadIdx.x] = key_bias_;
            const uint32_t visible = __ballot_sync(~0u, key_bias_ != -kInfinity);
            if (lane_id() == 0) smem_.bias_visible[warp_id()] = visible;
        }
    }

    __device__ __forceinline__ void multiply_query_key(float (&scores)[kMTiles][kNTiles][4]) {
        constexpr int kAcross = kNTiles / 2, kSteps = kHeadDim / 16 * kAcross;
        uint32_t q[2][kMTiles][4], k[2][4];
        const auto load = [&](int step) {
            const int d = step / kAcross;
            if (step % kAcross == 0) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) QueryTile::load_a(q[d % 2][m], query_lane_, m * 16, d * 16);
            }
            KeyTile::load_b(k[step % 2], key_lane_, step % kAcross * 16, d * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                const int step = d * kAcross + n / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t(&b)[4] = k[step % 2];
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(scores[m][n], q[d % 2][m], b[0], b[1]);
                    mma_m16n8k16<T>(scores[m][n + 1], q[d % 2][m], b[2], b[3]);
                }
            }
    }

    // Calls visit(i, row of the warp, w) for the words of VisibleKeys.
    template <typename Visit>
    static __device__ __forceinline__ void for_each_word(const Visit& visit) {
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i)
#pragma unroll
            for (int w = 0; w < kWarpWords; ++w) visit(i, i * 8 + lane_id() / 4, w);
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    template <typename Tile>
    __device__ __forceinline__ void apply_pairs(float (&scores)[kMTiles][kNTiles][4], const Tile& tile) {
        float scale = schedule_.scale;
        if (kBias == BiasKind::kNone ? !schedule_.raw_scores : schedule_.softcap > 0) {
            scale_and_cap(scores, scale, schedule_.softcap);
            scale = 1;
        }
        bool all_visible = tile.full();
        if constexpr (kBias == BiasKind::kKey) {
            scale_and_add_bias(scores, scale, smem_.bias + warp_key_);
#pragma unroll
            for (int w = 0; w < kWords; ++w) all_visible &= smem_.bias_visible[w] == ~0u;
        }
        if constexpr (kBias == BiasKind::kDense) scale_and_add_bias<T, kAhead>(scores, scale, smem_.bias, warp_row_, warp_key_);
        if (all_visible) return;

        uint32_t columns[kWarpWords];  // keys of this warp that some row sees
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
            uint32_t keys = tile.columns(word);
            if (kBias == BiasKind::kKey) keys &= smem_.bias_visible[word];
            if (kKeyWarps == 1 || word / kWarpWords == warp_key_ / kWarpKeys) columns[word % kWarpWords] = keys;
        }
        VisibleKeys<kMTiles, kNTiles> visible;
        for_each_word([&](int i, int, int w) { visible[i][w] = columns[w]; });
        const bool masked = mask_by_row() && !tile.full();
        if (!masked && !p_.is_causal) return hide_invisible(scores, visible);  // rows alike: less to compute
        if (masked)
            for_each_word([&](int i, int row, int w) { visible[i][w] &= smem_.mask[warp_row_ + row][warp_key_ / 32 + w]; });
        if (p_.is_causal) {
            const int first_key = tile.index() * kKeys + warp_key_;
            for_each_word([&](int i, int row, int w) {
                visible[i][w] &= bits_below(smem_.row_end[warp_row_ + row] - first_key, w);
            });
        }
        hide_invisible(scores, visible);
    }

    __device__ __forceinline__ void add_probs_value(const float (&probs)[kMTiles][kNTiles][4]) {
        constexpr int kAcross = kOutTiles / 2, kSteps = kNTiles / 2 * kAcross;
        uint32_t p[kMTiles][4], v[2][4];
        const auto load = [&](int step) {
            KeyTile::load_b_transposed(v[step % 2], value_lane_, step / kAcross * 16, step % kAcross * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int k = 0; k < kNTiles; k += 2) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = probs[m][k + i / 2] + i % 2 * 2;
                    p[m][i] = pack<T>(pair[0], pair[1]);
                }
#pragma unroll
            for (int d = 0; d < kOutTiles; d += 2) {
                const int step = k / 2 * kAcross + d / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t(&b)[4] = v[step % 2];
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(out_[m][d], p[m], b[0], b[1]);
                    mma_m16n8k16<T>(out_[m][d + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    // To one result of all warps that share rows, in the first of them.
    __device__ void merge_key_warps() {
        const int part = warp_key_ / kWarpKeys;
        float* merged = reinterpret_cast<float*>(&smem_.key);  // [kRows][kHeadDim]
        static_assert(kKeyWarps == 1 || sizeof(float) * kRows * kHeadDim <= 2 * sizeof(KeyTile));
        const auto for_each = [&](auto&& visit) {  // of this lane's rows
#pragma unroll
            for (int i = 0; i < kMTiles * 2; ++i) visit(i, warp_row_ + i * 8 + lane_id() / 4);
        };
        for_each([&](int i, int row) {
            smem_.max[part][row] = softmax_.max[i];
            smem_.sum[part][row] = row_sum(softmax_.sum[i]);
        });
        __syncthreads();
        for_each([&](int i, int row) {
            float largest = smem_.max[0][row], total = 0;
            for (int w = 1; w < kKeyWarps; ++w) largest = fmaxf(largest, smem_.max[w][row]);
            const float shift = largest == -kInfinity ? 0.f : largest;
            const auto weight = [&](float max) { return fast_exp2((max - shift) * schedule_.to_log2); };
            for (int w = 0; w < kKeyWarps; ++w) total += smem_.sum[w][row] * weight(smem_.max[w][row]);
            const float own = weight(softmax_.max[i]);
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                out_[i / 2][n][i % 2 * 2] *= own;
                out_[i / 2][n][i % 2 * 2 + 1] *= own;
            }
            softmax_.max[i] = largest;
            softmax_.sum[i] = lane_id() % 4 == 0 ? total : 0.f;
        });
        for (int w = kKeyWarps - 1; w >= 0; --w) {
            if (part == w) {
                for_each([&](int i, int row) {
#pragma unroll
                    for (int n = 0; n < kOutTiles; ++n) {
                        float* x = out_[i / 2][n] + i % 2 * 2;
                        float2* at = reinterpret_cast<float2*>(merged + row * kHeadDim + n * 8 + lane_id() % 4 * 2);
                        if (w < kKeyWarps - 1) x[0] += at->x, x[1] += at->y;
                        if (w > 0) *at = {x[0], x[1]};
                    }
                });
            }
            __syncthreads();
        }
    }

    // Calls store(row of the tile, m, h, 1 / sum, lse) for this lane's rows.
    template <typename Store>
    __device__ __forceinline__ void for_each_row(const Store& store) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float lse;
                const float inverse = softmax_.finish(2 * m + h, schedule_.raw_scores ? schedule_.scale : 1.f, lse);
                store(warp_row_ + m * 16 + h * 8 + lane_id() / 4, m, h, inverse, lse);
            }
    }

    // Through shared memory, so that whole rows are written.
    __device__ void store_out() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const float* x = out_[m][n] + 2 * h;
                T* to = &smem_.query.at(row, n * 8 + lane_id() % 4 * 2);
                *reinterpret_cast<uint32_t*>(to) = pack<T>(x[0] * inverse, x[1] * inverse);
            }
            const int i = query_row(row);
            if (lane_id() % 4 == 0 && i < sequence().rows)
                static_cast<float*>(p_.lse.data)[stat_offset(p_.lse, sequence(), query_head(row)) + i] = lse;
        });
        // A warp reads and writes its own rows alone.
        __syncwarp();
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, sequence(), 0);
        constexpr int kChunks = kHeadDim / 8;
        for (int at = lane_id(); at < kWarpRows * kChunks; at += 32) {
            const int row = warp_row_ + at / kChunks, chunk = at % kChunks, i = query_row(row);
            if (i >= sequence().rows || chunk * 8 >= p_.head_dim) continue;
            T* to = out + i * p_.out.row_stride + query_head(row) * p_.out.head_stride + chunk * 8;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&smem_.query.at(row, chunk * 8));
        }
    }

    __device__ void store_split() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
            const int i = query_row(row);
            if (i >= sequence().rows) return;
            const int64_t at = ((smem_.work.split * p_.batch + sequence().batch) * p_.heads + query_head(row)) * p_.seqlen_q + i;
            if (lane_id() % 4 == 0) p_.split_lse[at] = lse;
            if (lse == -kInfinity) return;
            float* out = p_.split_out + at * p_.head_dim;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const int col = n * 8 + lane_id() % 4 * 2;
                const float* x = out_[m][n] + 2 * h;
                if (col < p_.head_dim) *reinterpret_cast<float2*>(out + col) = {x[0] * inverse, x[1] * inverse};
            }
        });
    }

    const FwdParams& p_;
    const FwdSchedule& schedule_;
    SharedMemory& smem_;
    const int warp_row_, warp_key_;  // this warp's first row and key of a tile
    const uint32_t query_lane_, key_lane_, value_lane_, key_copy_;  // this lane's parts of shared addresses
    uint32_t bias_copy_ = 0;
    const T* key_;  // of this thread's first row of the first tile
    const T* value_;
    const char* bias_ = nullptr;          // of a dense bias and rows of one head, of this thread's first row to copy
    const uint32_t* mask_row_ = nullptr;  // of this thread's row
    float key_bias_ = 0;                  // of this thread's key of the next tile
    OnlineSoftmax<kMTiles> softmax_;
    float out_[kMTiles][kOutTiles][4];
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdSchedule schedule) {
    extern __shared__ __align__(128) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedMemory*>(raw_smem);
    if (threadIdx.x == 0) {
        unsigned block = blockIdx.x;
        const auto take = [&](int64_t count) {
            const unsigned index = block % static_cast<unsigned>(count);
            block /= static_cast<unsigned>(count);
            return static_cast<int>(index);
        };
        smem.work.split = take(p.splits);
        const int early_batch = schedule.batch_first ? take(schedule.batch) : 0;
        // The last rows come first: under causality they are the longest.
        smem.work.first_row = (schedule.row_tiles - 1 - take(schedule.row_tiles)) * Kernel::kRows;
        smem.work.first_head = take(schedule.heads) * schedule.pack;
        smem.work.s = Sequence(p, schedule.batch_first ? early_batch : static_cast<int>(block));
    }
    __syncthreads();
    if (smem.work.first_row >= smem.work.s.rows * schedule.pack) return;
    Kernel(p, schedule, smem).run();
}

}  // namespace flash_dmattn::cuda
