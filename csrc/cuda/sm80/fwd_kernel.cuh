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
    static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kWarps * 32, kBlocks = Shape::kBlocks;
    static constexpr int kWarpRows = kRows / Shape::kWarps;
    static constexpr int kMTiles = kWarpRows / 16, kNTiles = kKeys / 8, kOutTiles = kHeadDim / 8;
    static constexpr int kWords = kKeys / 32;
    static constexpr bool kPacks = std::is_same_v<Shape, FwdTileOfFewRows>;
    static_assert(kRows <= kThreads && kKeys <= kThreads, "one thread copies one row's mask, or one key's bias");

    using QueryTile = SmemTile<T, kRows, kHeadDim>;
    using KeyTile = SmemTile<T, kKeys, kHeadDim>;
    using BiasTile = SmemTile<T, kRows, kKeys>;

    struct SharedMemory {
        QueryTile query;  // at the end, out
        KeyTile key;
        KeyTile value;
        // Of the current tile of keys:
        std::conditional_t<kBias == BiasKind::kDense, BiasTile, float[kKeys]> bias;
        alignas(16) uint32_t mask[kRows][kWords];
        uint32_t bias_visible[kWords];  // keys whose bias is not -inf
        int row_end[kRows];             // a row sees keys below this by causality and length
    };

    __device__ FwdKernel(const FwdParams& p, const FwdSchedule& schedule, SharedMemory& smem, const Sequence& s,
                         int first_head, int row_tile, int split)
        : p_(p), schedule_(schedule), smem_(smem), s_(s), first_head_(first_head), first_row_(row_tile * kRows),
          split_(split), warp_row_(warp_id() * kWarpRows),
          query_lane_(kept(smem.query.lane_down() + warp_row_ * kRowBytes)), key_lane_(kept(smem.key.lane_across())),
          value_lane_(kept(smem.value.lane_down())), key_copy_(kept(KeyCopy::lane_address(smem.key))) {
        const int kv_head = first_head / static_cast<int>(p.heads / p.kv_heads);
        const int row = KeyCopy::first_row();
        key_ = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head) + row * p.key.row_stride;
        value_ = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head) + row * p.value.row_stride;
        if (kBias != BiasKind::kNone) {
            const int64_t offset = pair_offset(p.bias, s, first_head, p.heads);
            bias_ = static_cast<const char*>(p.bias.data) + offset * (p.bias.dtype == DataType::kFloat32 ? 4 : 2);
        }
        if (has_mask()) {
            const int mask_row = min(query_row(min(static_cast<int>(threadIdx.x), kRows - 1)), s.rows - 1);
            const PackedMask& mask = p.packed_mask;
            mask_row_ = mask.bits + s.batch * mask.bits_batch_stride +
                        first_head / (p.heads / mask.heads) * mask.bits_head_stride +
                        (s.first_row + mask_row) * mask.bits_row_stride;
        }
    }

    __device__ void run() {
        const int low = query_row(0), high = min(query_row(kRows - 1), s_.rows - 1);
        const int key_end = s_.keys_of(high, p_.is_causal), full_end = s_.keys_of(low, p_.is_causal);
        const int tiles = ceil_div(key_end, kKeys), splits = static_cast<int>(p_.splits);
        const MaskSummaries<kRows, kKeys> mask_summaries(p_, s_, first_head_);
        const auto summarize = [&](int tile) {
            auto summary = mask_summaries.of(low, high, tile);
            summary.full &= (tile + 1) * kKeys <= full_end;
#pragma unroll
            for (int w = 0; w < kWords; ++w) summary.columns[w] &= bits_below(key_end - tile * kKeys, w);
            return summary;
        };
        TileScan<kKeys, decltype(summarize)> tile(static_cast<int>(static_cast<int64_t>(tiles) * split_ / splits),
                                                  static_cast<int>(static_cast<int64_t>(tiles) * (split_ + 1) / splits),
                                                  summarize);
        const bool idle = query_row(warp_row_) >= s_.rows;  // this warp has no rows and only copies

        bool more = tile.next();
        if (more) {
            load_query();
            load_key(tile);
            load_pairs(tile);
            store_key_bias();
        }
        cp_async_commit();
        for (int row = threadIdx.x; row < kRows; row += kThreads)
            smem_.row_end[row] = query_row(row) < s_.rows ? s_.keys_of(query_row(row), p_.is_causal) : 0;

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
    static constexpr int kValueAfterKey = sizeof(KeyTile);
    static_assert(KeyCopy::kRowsAtOnce <= 32, "a step's keys lie in one word of a tile's columns");

    __device__ bool has_mask() const { return p_.packed_mask.bits != nullptr; }
    // Row of the sequence, and its head, of a row of the tile.
    __device__ int query_row(int row) const { return kPacks ? (first_row_ + row) / schedule_.pack : first_row_ + row; }
    __device__ int query_head(int row) const {
        return kPacks ? first_head_ + (first_row_ + row) % schedule_.pack : first_head_;
    }

    __device__ void load_query() {
        const T* query = static_cast<const T*>(p_.query.data) + query_offset(p_.query, s_, 0);
        QueryCopy::start(QueryCopy::lane_address(smem_.query), static_cast<int>(p_.head_dim), [&](int i) {
            const int row = QueryCopy::first_row() + i * QueryCopy::kRowsAtOnce;
            const int64_t at = query_row(row) * p_.query.row_stride + query_head(row) * p_.query.head_stride;
            return RowSource<T>{query + at, query_row(row) < s_.rows};
        });
    }

    // Keys that no row sees are not read, and neither are their values.
    template <typename Tile>
    __device__ __forceinline__ void load_key(const Tile& tile) {
        load_visible(key_copy_, key_, p_.key.row_stride, tile, [](int) { return ~0u; });
    }
    template <typename Tile>
    __device__ __forceinline__ void load_value(const Tile& tile) {
        load_visible(key_copy_ + kValueAfterKey, value_, p_.value.row_stride, tile,
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
        if (has_mask() && !tile.full() && threadIdx.x < kRows)
            cp_async<kWords * 4>(smem_address(smem_.mask[threadIdx.x]), mask_row_ + tile.index() * kWords);
        if constexpr (kBias == BiasKind::kKey) {
            const int key = tile.index() * kKeys + threadIdx.x;
            key_bias_ = 0;
            if (threadIdx.x < kKeys && key < s_.keys) {
                const int64_t at = key * p_.bias.col_stride;
                key_bias_ = p_.bias.dtype == DataType::kFloat32 ? reinterpret_cast<const float*>(bias_)[at]
                                                                : to_float(reinterpret_cast<const T*>(bias_)[at]);
            }
        }
        if constexpr (kBias == BiasKind::kDense) load_dense_bias(tile.index() * kKeys);
    }

    __device__ __forceinline__ void load_dense_bias(int first_key) {
        const T* bias = reinterpret_cast<const T*>(bias_) + first_key * p_.bias.col_stride;
        // What stands beyond the keys of a sequence is hidden; here the tensor's end matters alone.
        const int keys = static_cast<int>(p_.seqlen_k) - first_key;
        if (schedule_.bias_aligned && (keys >= kKeys || keys % 8 == 0)) {
            BiasCopy::start(BiasCopy::lane_address(smem_.bias), keys, [&](int i) {
                const int row = query_row(BiasCopy::first_row() + i * BiasCopy::kRowsAtOnce);
                return RowSource<T>{bias + row * p_.bias.row_stride, row < s_.rows};
            });
        } else {
#pragma unroll 1
            for (int at = threadIdx.x; at < kRows * kKeys; at += kThreads) {
                const int col = at % kKeys, row = query_row(at / kKeys);
                const bool valid = row < s_.rows && col < keys;
                smem_.bias.at(at / kKeys, col) =
                    valid ? bias[row * p_.bias.row_stride + col * p_.bias.col_stride] : T(0.f);
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
#pragma unroll
        for (int d = 0; d < kHeadDim; d += 16) {
            uint32_t q[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) QueryTile::load_a(q[m], query_lane_, m * 16, d);
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                uint32_t k[4];
                KeyTile::load_b(k, key_lane_, n * 8, d);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(scores[m][n], q[m], k[0], k[1]);
                    mma_m16n8k16<T>(scores[m][n + 1], q[m], k[2], k[3]);
                }
            }
        }
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
            scale_and_add_bias(scores, scale, smem_.bias);
#pragma unroll
            for (int w = 0; w < kWords; ++w) all_visible &= smem_.bias_visible[w] == ~0u;
        }
        if constexpr (kBias == BiasKind::kDense) scale_and_add_bias<T>(scores, scale, smem_.bias, warp_row_, 0);
        if (all_visible) return;

        const bool masked = has_mask() && !tile.full();
        hide_invisible(scores, [&](int row, int word) {
            row += warp_row_;
            uint32_t visible = bits_below(smem_.row_end[row] - tile.index() * kKeys, word);
            if (masked) visible &= smem_.mask[row][word];
            if (kBias == BiasKind::kKey) visible &= smem_.bias_visible[word];
            return visible;
        });
    }

    __device__ __forceinline__ void add_probs_value(const float (&probs)[kMTiles][kNTiles][4]) {
#pragma unroll
        for (int k = 0; k < kNTiles; k += 2) {
            uint32_t a[kMTiles][4];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = probs[m][k + i / 2] + i % 2 * 2;
                    a[m][i] = pack<T>(pair[0], pair[1]);
                }
#pragma unroll
            for (int d = 0; d < kOutTiles; d += 2) {
                uint32_t v[4];
                KeyTile::load_b_transposed(v, value_lane_, k * 8, d * 8);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(out_[m][d], a[m], v[0], v[1]);
                    mma_m16n8k16<T>(out_[m][d + 1], a[m], v[2], v[3]);
                }
            }
        }
    }

    // Calls store(row of the tile, m, h, 1 / sum, lse as a power of 2) for this lane's rows.
    template <typename Store>
    __device__ __forceinline__ void for_each_row(const Store& store) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float lse;
                const float inverse = softmax_.finish(2 * m + h, schedule_.to_log2, lse);
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
            if (lane_id() % 4 == 0 && i < s_.rows)
                static_cast<float*>(p_.lse.data)[stat_offset(p_.lse, s_, query_head(row)) + i] = lse * kLn2;
        });
        // A warp reads and writes its own rows alone.
        __syncwarp();
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, s_, 0);
        constexpr int kChunks = kHeadDim / 8;
        for (int at = lane_id(); at < kWarpRows * kChunks; at += 32) {
            const int row = warp_row_ + at / kChunks, chunk = at % kChunks, i = query_row(row);
            if (i >= s_.rows || chunk * 8 >= p_.head_dim) continue;
            T* to = out + i * p_.out.row_stride + query_head(row) * p_.out.head_stride + chunk * 8;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&smem_.query.at(row, chunk * 8));
        }
    }

    __device__ void store_split() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
            const int i = query_row(row);
            if (i >= s_.rows) return;
            const int64_t at = ((split_ * p_.batch + s_.batch) * p_.heads + query_head(row)) * p_.seqlen_q + i;
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
    const Sequence& s_;
    const int first_head_, first_row_, split_, warp_row_;
    const uint32_t query_lane_, key_lane_, value_lane_, key_copy_;  // this lane's parts of shared addresses
    const T* key_;  // of this thread's first row of the first tile
    const T* value_;
    const char* bias_ = nullptr;
    const uint32_t* mask_row_ = nullptr;  // of this thread's row
    float key_bias_ = 0;                  // of this thread's key of the next tile
    OnlineSoftmax<kMTiles> softmax_;
    float out_[kMTiles][kOutTiles][4] = {};
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fwd_kernel(const __grid_constant__ FwdParams p, const __grid_constant__ FwdSchedule schedule) {
    extern __shared__ __align__(128) unsigned char raw_smem[];
    unsigned block = blockIdx.x;
    const auto take = [&](unsigned count) {
        const unsigned index = block % count;
        block /= count;
        return static_cast<int>(index);
    };
    const int split = take(static_cast<unsigned>(p.splits));
    const int early_batch = schedule.batch_first ? take(schedule.batch) : 0;
    // The last rows come first: under causality they are the longest.
    const int row_tile = schedule.row_tiles - 1 - take(schedule.row_tiles);
    const int head = take(schedule.heads);
    const Sequence s(p, schedule.batch_first ? early_batch : static_cast<int>(block));
    if (row_tile * Kernel::kRows >= s.rows * schedule.pack) return;
    Kernel(p, schedule, *reinterpret_cast<typename Kernel::SharedMemory*>(raw_smem), s, head * schedule.pack, row_tile,
           split)
        .run();
}

}  // namespace flash_dmattn::cuda
