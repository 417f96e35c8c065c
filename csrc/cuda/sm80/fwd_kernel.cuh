// The forward for compute capability 8.0 and up: one block owns a tile of query rows and goes over the keys once.
#pragma once

#include "../common/online_softmax.cuh"
#include "../common/pairs.cuh"
#include "../common/sequence.cuh"
#include "../common/smem_tile.cuh"
#include "../common/tile_scan.cuh"

namespace flash_dmattn::cuda {

// How the work is cut among blocks.
struct FwdSchedule {
    int row_tiles;  // of a head, or of `pack` heads
    int heads;      // H / pack
    int batch;
    int pack;       // query heads that share a tile: row r of it is row r / pack of head r % pack
    bool batch_first;  // neighbouring blocks differ in their batch, else in their row tile
};

template <typename T, int kHeadDim, BiasKind kBias, typename Shape>
class FwdKernel {
public:
    static constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kThreads = Shape::kWarps * 32;
    static constexpr int kWarpRows = kRows / Shape::kWarps;
    static constexpr int kMTiles = kWarpRows / 16, kNTiles = kKeys / 8, kOutTiles = kHeadDim / 8;
    static constexpr int kWords = kKeys / 32;
    static_assert(kRows <= kThreads && kKeys <= kThreads, "one thread copies one row's mask, or one key's bias");

    struct SharedMemory {
        SmemTile<T, kRows, kHeadDim> query;  // at the end, out
        SmemTile<T, kKeys, kHeadDim> key;
        SmemTile<T, kKeys, kHeadDim> value;
        // Of the current tile of keys:
        std::conditional_t<kBias == BiasKind::kDense, SmemTile<T, kRows, kKeys>, float[kKeys]> bias;
        alignas(16) uint32_t mask[kRows][kWords];
        uint32_t bias_visible[kWords];  // keys whose bias is not -inf
        int row_end[kRows];             // a row sees keys below this by causality and length
    };

    __device__ FwdKernel(const FwdParams& p, const FwdSchedule& schedule, SharedMemory& smem, const Sequence& s,
                         int first_head, int row_tile, int split)
        : p_(p), smem_(smem), s_(s), pack_(schedule.pack), first_head_(first_head), first_row_(row_tile * kRows),
          split_(split), warp_row_(warp_id() * kWarpRows) {
        const int kv_head = first_head / static_cast<int>(p.heads / p.kv_heads);
        key_ = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head);
        value_ = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head);
        if (kBias != BiasKind::kNone) bias_offset_ = pair_offset(p.bias, s, first_head, p.heads);
        if (has_mask()) {
            const int row = min(query_row(min(static_cast<int>(threadIdx.x), kRows - 1)), s.rows - 1);
            const PackedMask& mask = p.packed_mask;
            mask_row_ = mask.bits + s.batch * mask.bits_batch_stride +
                        first_head / (p.heads / mask.heads) * mask.bits_head_stride +
                        (s.first_row + row) * mask.bits_row_stride;
        }
        // Scores stay unscaled where nothing is added to them and their order is that of the scaled ones.
        raw_scores_ = kBias == BiasKind::kNone && p.softcap == 0 && p.softmax_scale > 0;
        scale_ = static_cast<float>(p.softmax_scale);
        to_log2_ = raw_scores_ ? scale_ * kLog2E : kLog2E;
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
        TileScan<kKeys, decltype(summarize)> scan(static_cast<int>(static_cast<int64_t>(tiles) * split_ / splits),
                                                  static_cast<int>(static_cast<int64_t>(tiles) * (split_ + 1) / splits),
                                                  summarize);
        const bool idle = query_row(warp_row_) >= s_.rows;  // this warp has no rows and only copies

        Tile tile;
        bool more = scan.next(tile.index, tile.summary);
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
            more = scan.next(tile.index, tile.summary);
            if (more) {
                load_key(tile);
                load_pairs(tile);
            }
            cp_async_commit();
            if (!idle) {
                softmax_.update(scores, out_, to_log2_);
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
    struct Tile {
        int index;
        TileSummary<kKeys> summary;
        __device__ int first_key() const { return index * kKeys; }
        __device__ bool sees(int key) const { return summary.columns[key / 32] >> (key % 32) & 1; }
    };

    __device__ bool has_mask() const { return p_.packed_mask.bits != nullptr; }
    // Row of the sequence, and its head, of a row of the tile.
    __device__ int query_row(int row) const { return pack_ == 1 ? first_row_ + row : (first_row_ + row) / pack_; }
    __device__ int query_head(int row) const { return pack_ == 1 ? first_head_ : first_head_ + (first_row_ + row) % pack_; }

    __device__ void load_query() {
        const T* query = static_cast<const T*>(p_.query.data) + query_offset(p_.query, s_, 0);
        copy_rows_async<kThreads>(smem_.query, static_cast<int>(p_.head_dim), [&](int row) -> const T* {
            const int i = query_row(row);
            return i < s_.rows ? query + i * p_.query.row_stride + query_head(row) * p_.query.head_stride : nullptr;
        });
    }

    // Keys that no row sees are not read, and neither are their values.
    __device__ void load_key(const Tile& tile) {
        copy_rows_async<kThreads>(smem_.key, static_cast<int>(p_.head_dim), [&](int row) -> const T* {
            return tile.sees(row) ? key_ + (tile.first_key() + row) * p_.key.row_stride : nullptr;
        });
    }
    __device__ void load_value(const Tile& tile) {
        copy_rows_async<kThreads>(smem_.value, static_cast<int>(p_.head_dim), [&](int row) -> const T* {
            bool visible = tile.sees(row);
            if (kBias == BiasKind::kKey) visible &= smem_.bias_visible[row / 32] >> (row % 32) & 1;
            return visible ? value_ + (tile.first_key() + row) * p_.value.row_stride : nullptr;
        });
    }

    // Starts to fetch what is added to the scores and what hides them.
    __device__ void load_pairs(const Tile& tile) {
        if (has_mask() && !tile.summary.full && threadIdx.x < kRows)
            cp_async<kWords * 4>(smem_address(smem_.mask[threadIdx.x]), mask_row_ + tile.index * kWords);
        if constexpr (kBias == BiasKind::kKey) {
            const int key = tile.first_key() + threadIdx.x;
            key_bias_ = 0;
            if (threadIdx.x < kKeys && key < s_.keys) {
                const int64_t at = bias_offset_ + key * p_.bias.col_stride;
                key_bias_ = p_.bias.dtype == DataType::kFloat32 ? static_cast<const float*>(p_.bias.data)[at]
                                                                : to_float(static_cast<const T*>(p_.bias.data)[at]);
            }
        }
        if constexpr (kBias == BiasKind::kDense) load_dense_bias(tile);
    }

    __device__ void load_dense_bias(const Tile& tile) {
        const T* bias = static_cast<const T*>(p_.bias.data) + bias_offset_;
        const int64_t row_stride = p_.bias.row_stride, col_stride = p_.bias.col_stride;
        const int keys = s_.keys - tile.first_key();
        const bool aligned = col_stride == 1 && row_stride % 8 == 0 && reinterpret_cast<intptr_t>(bias) % 16 == 0;
        if (aligned) {
            copy_rows_async<kThreads>(smem_.bias, keys, [&](int row) -> const T* {
                const int i = query_row(row);
                return i < s_.rows ? bias + i * row_stride + tile.first_key() : nullptr;
            });
        } else {
            for (int at = threadIdx.x; at < kRows * kKeys; at += kThreads) {
                const int row = at / kKeys, col = at % kKeys, i = query_row(row);
                const bool valid = i < s_.rows && col < keys;
                smem_.bias.at(row, col) = valid ? bias[i * row_stride + (tile.first_key() + col) * col_stride] : T(0.f);
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
            for (int m = 0; m < kMTiles; ++m) smem_.query.load_a(q[m], warp_row_ + m * 16, d);
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                uint32_t k[4];
                smem_.key.load_b(k, n * 8, d);
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(scores[m][n], q[m], k[0], k[1]);
                    mma_m16n8k16<T>(scores[m][n + 1], q[m], k[2], k[3]);
                }
            }
        }
    }

    // Products to what the softmax sees: scaled, capped, biased, and -inf where invisible.
    __device__ __forceinline__ void apply_pairs(float (&scores)[kMTiles][kNTiles][4], const Tile& tile) {
        float scale = scale_;
        if (p_.softcap > 0 || (kBias == BiasKind::kNone && !raw_scores_)) {
            scale_and_cap(scores, scale_, static_cast<float>(p_.softcap));
            scale = 1;
        }
        bool all_visible = tile.summary.full;
        if constexpr (kBias == BiasKind::kKey) {
            scale_and_add_bias(scores, scale, smem_.bias);
#pragma unroll
            for (int w = 0; w < kWords; ++w) all_visible &= smem_.bias_visible[w] == ~0u;
        }
        if constexpr (kBias == BiasKind::kDense) scale_and_add_bias<T>(scores, scale, smem_.bias, warp_row_, 0);
        if (all_visible) return;

        const bool masked = has_mask() && !tile.summary.full;
        hide_invisible(scores, [&](int row, int word) {
            row += warp_row_;
            uint32_t visible = bits_below(smem_.row_end[row] - tile.first_key(), word);
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
                smem_.value.load_b_transposed(v, k * 8, d * 8);
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
                const float inverse = softmax_.finish(2 * m + h, to_log2_, lse);
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
    SharedMemory& smem_;
    const Sequence& s_;
    const int pack_, first_head_, first_row_, split_, warp_row_;
    const T* key_;
    const T* value_;
    const uint32_t* mask_row_ = nullptr;  // of this thread's row
    int64_t bias_offset_ = 0;
    float key_bias_ = 0;  // of this thread's key of the next tile
    bool raw_scores_;
    float scale_, to_log2_;
    OnlineSoftmax<kMTiles> softmax_;
    float out_[kMTiles][kOutTiles][4] = {};
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
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
    if (row_tile * Kernel::kRows / schedule.pack >= s.rows) return;
    Kernel(p, schedule, *reinterpret_cast<typename Kernel::SharedMemory*>(raw_smem), s, head * schedule.pack, row_tile,
           split)
        .run();
}

}  // namespace flash_dmattn::cuda
