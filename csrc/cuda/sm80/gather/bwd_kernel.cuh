// The backward over key lists: dQ of one tile of rows, and what that tile adds to dK, dV and the bias's gradient.
//
// A block owns a tile of query rows of one head, keeps its Q and dO in shared memory and its dQ in registers, and goes
// over the list of keys that its rows see. What the tile adds to a key's dK and dV is summed in global memory.
//
// A turn of the main loop makes P and dS of one tile of keys, and multiplies those of the tile before into dQ, dK and
// dV: the two keep different units busy, and one barrier a turn is enough.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/mask/key_list.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/sm80/bwd/kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

// The order of tiles of rows. Those of one chain add to the same numbers of dK, dV or the bias's gradient. Where
// deterministic, they do so one after the other: since lists are sorted, a tile may add to all keys below the watermark
// that the one before it has published, and follows it closely.
struct GatherBwdTileScheduler {
    int chains, heads, batches, num_m_blocks;  // heads, tile_heads together, and batches: of one chain

    // Of the rows that a block could have, those of one list.
    static constexpr __host__ __device__ int rows_of(const BwdArgs& p, int rows) {
        return p.lists.num_m_blocks > 1 && p.lists.tile_rows < rows ? static_cast<int>(p.lists.tile_rows) : rows;
    }

    constexpr __host__ __device__ GatherBwdTileScheduler(const BwdArgs& p, int rows)
        : chains(1),
          heads(static_cast<int>(p.heads / p.tile_heads)),
          batches(static_cast<int>(p.batch)),
          num_m_blocks(static_cast<int>(ceil_div<int64_t>(p.seqlen_q, rows_of(p, rows)))) {
        const bool dense = p.dbias_accum_size > 0;  // its entries may be shared by more than a group's heads
        if (!dense || p.dbias.heads > 1) chains = static_cast<int>(p.kv_heads), heads /= chains;
        const int sharers = dense ? static_cast<int>(p.dbias.batch_group_size) : 1;
        chains *= batches / sharers, batches = sharers;
    }
    constexpr __host__ __device__ int length() const { return heads * batches * num_m_blocks; }
};

// A tile of rows, and its place in the order.
struct GatherBwdWorkTile {
    Sequence s;
    int head, first_row;  // the first head
    int chain, place;     // in the chain

    __device__ GatherBwdWorkTile(const BwdArgs& p, int tile_rows, unsigned index) : s(p, 0) {
        const GatherBwdTileScheduler all(p, tile_rows);
        const unsigned length = all.length(), chains = all.chains;
        chain = p.deterministic ? index % chains : index / length;
        // Unordered, the last rows come first: under causality their lists are the longest.
        place = p.deterministic ? index / chains : length - 1 - index % length;
        const int tile_heads = static_cast<int>(p.tile_heads),
                  head_chains = static_cast<int>(p.heads) / tile_heads / all.heads;
        head = (chain % head_chains * all.heads + place % all.heads) * tile_heads;
        first_row = place / all.heads / all.batches * GatherBwdTileScheduler::rows_of(p, tile_rows);
        s = Sequence(p, chain / head_chains * all.batches + place / all.heads % all.batches);
    }
};

// Where a tile of rows finds the keys of its sequence and head; of a dense bias, its own first row.
template <typename T>
struct GatherPointers {
    const T* key;
    const T* value;
    float* dkey;  // in dkv_accum
    float* dvalue;
    const char* bias = nullptr;
    float* key_dbias = nullptr;
    int64_t dense_dbias = 0;  // an offset: in dbias or in dbias_accum

    __device__ GatherPointers(const BwdArgs& p, const Sequence& s, int head, int first_row) {
        const int kv_head = shared_head(head, p.heads, p.kv_heads);
        key = static_cast<const T*>(p.key.data) + key_offset(p.key, s, kv_head);
        value = static_cast<const T*>(p.value.data) + key_offset(p.value, s, kv_head);
        const int64_t first_key = p.cu_seqlens_k == nullptr ? s.batch * p.seqlen_k : s.first_key;
        dkey = p.dkv_accum + (first_key * p.kv_heads + kv_head) * p.dkv_cols;
        dvalue = dkey + p.dkv_rows * p.kv_heads * p.dkv_cols;
        if (p.bias.kind != BiasKind::kNone) {
            const int64_t offset = score_offset(p.bias, s, head, p.heads) + first_row * p.bias.row_stride;
            bias = bias_data(p.bias, offset);
        }
        if (p.dbias.data == nullptr) return;
        const int64_t dbias = score_offset(p.dbias, s, head, p.heads);
        key_dbias = static_cast<float*>(p.dbias.data) + dbias;
        dense_dbias = dbias + first_row * p.dbias.row_stride;
    }
};

// What the block must know of a tile of keys.
template <int kRows, int kKeys>
struct GatheredKeyStage {
    static constexpr int kWords = kRows / 32;
    alignas(16) uint32_t rows[kWords][kKeys];  // bit i: row 32 w + i of the tile sees the key
    alignas(16) float bias[kKeys];             // times log2(e)
    alignas(16) int key[kKeys];                // -1 where no row of the tile sees it
    uint32_t seen_by_all[kWords][kKeys / 32];  // keys that 32 rows see
};

template <typename Traits, BiasKind kBias>
class GatherBwd {
public:
    using T = typename Traits::T;
    static constexpr int kKeys = Traits::kKeys, kRows = Traits::kRows, kThreads = Traits::kThreads;
    static constexpr bool kKeyBias = kBias == BiasKind::kKey;
    static constexpr int kLaneKeys = Traits::kScoreN * 2;  // of S, that a lane holds
    static_assert(kKeys == KeyListsView::kAlign && KeyListsView::kRows % kRows == 0 && Traits::kScoreKeys <= 32);

    // A turn needs K of two tiles and V of one; where there is room, those of the next turn are loaded during it.
    static constexpr bool kPrefetchesKv = !Traits::kIsSmall && Traits::kHeadDim <= 192;
    static constexpr int kKStages = kPrefetchesKv ? 3 : 2, kVStages = kPrefetchesKv ? 2 : 1;

    struct SharedStorage {
        QdoStage<Traits, false> rows;
        typename Traits::KeysTile key[kKStages], value[kVStages];
        typename Traits::ScoresTile probs[2], dscores[2];
        GatheredKeyStage<kRows, kKeys> keys[4];
        float key_sums[2][Traits::kSizes.score_row_warps][kKeys];  // of dx
        GatherBwdWorkTile tile;
        KeyList list;
        GatherPointers<T> at;
    };

    // smem.tile has been written.
    __device__ GatherBwd(const BwdArgs& p, SharedStorage& smem)
        : p_(p),
          smem_(smem),
          address_of(&smem),
          score_row_(warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows),
          score_key_(warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys) {
        if (threadIdx.x == 0) {
            smem.list = KeyList(p, sequence(), head(), first_row());
            smem.at = GatherPointers<T>(p, sequence(), head(), first_row());
        }
        __syncthreads();
        if (tile_rows() <= 0) return;
        num_n_blocks_ = smem.list.size / kKeys;
        if (p.is_causal && p.lists.num_m_blocks == 1)
            truncate_list(sequence().causal_end(first_row() + tile_rows() - 1));
    }

    __device__ void run() {
        clear(dq_);
        const HeadPointers<T> rows(p_, sequence(), head());
        packs_heads() ? load_packed_heads(rows)
                      : load_qdo_stage(smem_.rows, address_of, p_, sequence(), rows, first_row(), tile_rows(), 0);
        next_position_ = list_position(0);
        for (int tile = 0; tile < 2; ++tile) {
            fetch_positions(tile);
            store_keys(tile);
        }
        __syncthreads();
        load_kv(0);
        wait_for_qdo(smem_.rows, score_rows());

        // The two warps of a scheduler take the halves of a turn in different order: while one multiplies, the other
        // computes exponentials.
        const bool scores_first = warp_id() < kThreads / 64;
        for (int tile = -1; tile < num_n_blocks_; ++tile) {
            if (p_.deterministic) wait_for_progress(tile);
            cp_async_wait<0>();
            __syncthreads();  // P and dS of `tile` are whole, and so are K and V of the next
            if (p_.deterministic) publish_progress(tile);
            if (kPrefetchesKv) load_kv(tile + 2);
            fetch_positions(tile + 3);
            if (kKeyBias && needs_dbias() && tile >= 0) accumulate_key_dbias(tile);
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                if ((half == 0) == scores_first) {
                    if (tile + 1 < num_n_blocks_) compute_scores(tile + 1);
                } else if (tile >= 0) {
                    accumulate_gradients(tile);
                }
            }
            store_keys(tile + 3);
            if (!kPrefetchesKv) {
                __syncthreads();
                load_kv(tile + 2);
            }
        }
        if (p_.deterministic) finish_progress();
        __syncthreads();
        store_dq();
    }

private:
    using Stage = GatheredKeyStage<kRows, kKeys>;

    __device__ const Sequence& sequence() const { return smem_.tile.s; }
    __device__ int head() const { return smem_.tile.head; }
    __device__ int first_row() const { return smem_.tile.first_row; }
    __device__ int tile_rows() const {
        return min(sequence().rows - first_row(), GatherBwdTileScheduler::rows_of(p_, kRows));
    }
    // Several heads, of which each has `rows_per_head` rows of the tile; of these tile_rows() exist.
    __device__ bool packs_heads() const { return p_.tile_heads > 1; }
    __device__ int rows_per_head() const { return packs_heads() ? kRows / 2 : kRows; }
    // Rows beyond these are left out without a look at who sees which key.
    __device__ int score_rows() const { return packs_heads() ? kRows : tile_rows(); }
    __device__ bool needs_dbias() const { return p_.dbias.data != nullptr; }
    __device__ bool accumulates_dbias() const { return kBias == BiasKind::kDense && p_.dbias_accum_size > 0; }
    __device__ const Stage& stage_of(int tile) const { return smem_.keys[tile % 4]; }
    __device__ const typename Traits::KeysTile& k_of(int tile) const { return smem_.key[tile % kKStages]; }
    __device__ const typename Traits::KeysTile& v_of(int tile) const { return smem_.value[tile % kVStages]; }

    // This thread's key of a tile of the list.
    __device__ int list_position(int tile) const {
        return threadIdx.x < kKeys && tile < num_n_blocks_ ? smem_.list.key(tile * kKeys + threadIdx.x) : -1;
    }
    // Leaves out the tiles whose keys all lie at or beyond `end`.
    __device__ void truncate_list(int end) {
        int low = 0;
        while (low < num_n_blocks_) {
            const int middle = (low + num_n_blocks_) / 2;
            if (static_cast<unsigned>(smem_.list.keys[middle * kKeys]) < static_cast<unsigned>(end)) {
                low = middle + 1;
            } else {
                num_n_blocks_ = middle;
            }
        }
    }

    // What memory says of the keys of `tile`, one thread a key. It travels through registers while the block computes.
    __device__ __forceinline__ void fetch_positions(int tile) {
        if (threadIdx.x >= kKeys) return;
        position_ = next_position_;
        next_position_ = list_position(tile + 1);
        if (!is_key(position_, sequence().keys)) position_ = -1;
        if (position_ < 0) return;
        visibility_data_ = smem_.list.fetch(tile * kKeys + threadIdx.x, position_);
        if constexpr (kKeyBias) {
            const uint32_t bits = cuda::load_key_bias(p_.bias, smem_.at.bias, position_ * p_.bias.col_stride);
            key_bias_ = key_bias_of<T>(p_.bias, bits);
        }
    }
    // Keys that no row of the tile sees are left out from here on: they may hold anything.
    __device__ __forceinline__ void store_keys(int tile) {
        if (threadIdx.x >= kKeys) return;
        Stage& stage = smem_.keys[tile % 4];
        SeeingRows seeing = smem_.list.seeing(visibility_data_, position_, sequence(), p_.is_causal);
        if (position_ < 0 || (kKeyBias && key_bias_ == -kInfinity)) seeing.end = 0;
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < Stage::kWords; ++w) {
            const uint32_t rows = seeing.from(first_row() + w * 32 % rows_per_head());
            stage.rows[w][threadIdx.x] = rows;
            any |= rows;
            const uint32_t seen_by_all = __ballot_sync(~0u, rows == bits_below(score_rows(), w));
            if (lane_id() == 0) stage.seen_by_all[w][warp_id()] = seen_by_all;
        }
        stage.key[threadIdx.x] = any != 0 ? position_ : -1;
        stage.bias[threadIdx.x] = any != 0 ? key_bias_ * kLog2E : 0;
    }

    // As load_qdo_stage; zeros stand for rows that do not exist.
    __device__ __forceinline__ void load_packed_heads(const HeadPointers<T>& head) {
        using Copy = RowCopy<kThreads, typename Traits::RowsTile>;
        const auto load = [&](const typename Traits::RowsTile& to, const T* from, const RowsView& view) {
            const uint32_t lane = address_of(to) + Traits::RowsTile::offset(Copy::first_row(), Copy::chunk()) * 2;
            Copy::start(lane, static_cast<int>(p_.head_dim), [&](int i) {
                const int at = Copy::first_row() + i * Copy::kRowsAtOnce, row = at % rows_per_head();
                return RowSource<T>{
                    from + at / rows_per_head() * view.head_stride + (first_row() + row) * view.row_stride,
                    row < tile_rows()};
            });
        };
        load(smem_.rows.query, head.query, p_.query);
        load(smem_.rows.dout, head.dout, p_.dout);
        const int at = threadIdx.x, row = at % rows_per_head();
        if (at >= kRows) return;
        if (row < tile_rows()) {
            const auto load_stat = [&](float& to, const float* from, const RowStatView& view) {
                cp_async<4>(smem_address(&to), from + at / rows_per_head() * view.head_stride + first_row() + row);
            };
            load_stat(smem_.rows.lse[at], head.lse, p_.lse);
            load_stat(smem_.rows.delta[at], head.delta, p_.delta);
        } else {
            smem_.rows.lse[at] = smem_.rows.delta[at] = 0;
        }
    }

    // K and V of `tile`; stage_of(tile) has been stored.
    __device__ __forceinline__ void load_kv(int tile) {
        if (tile < num_n_blocks_) {
            gather(smem_.key[tile % kKStages], smem_.at.key, p_.key.row_stride, stage_of(tile));
            gather(smem_.value[tile % kVStages], smem_.at.value, p_.value.row_stride, stage_of(tile));
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void gather(typename Traits::KeysTile& to, const T* from, int64_t row_stride,
                                           const Stage& stage) {
        using Copy = RowCopy<kThreads, typename Traits::KeysTile>;
        const uint32_t lane = address_of(to) + Traits::KeysTile::offset(Copy::first_row(), Copy::chunk()) * 2;
        Copy::start(lane, static_cast<int>(p_.head_dim), [&](int i) {
            const int key = stage.key[Copy::first_row() + i * Copy::kRowsAtOnce];
            return RowSource<T>{from + key * row_stride, key >= 0};
        });
    }

    __device__ __forceinline__ void compute_scores(int tile) {
#pragma unroll
        for (int pass = 0; pass < Traits::kPasses; ++pass) compute_scores(tile, pass);
        if (kKeyBias && needs_dbias()) store_key_sums(tile);
    }

    // P and dS of one pass's keys, rounded, to shared memory.
    __device__ __forceinline__ void compute_scores(int tile, int pass) {
        const Stage& stage = stage_of(tile);
        const int first_n = pass * Traits::kPassN, first_key = score_key_ + first_n * 8, rows = score_rows();
        uint32_t bias[kBias == BiasKind::kDense ? Traits::kScoreM : 1][Traits::kPassN][2];
        if constexpr (kBias == BiasKind::kDense) gather_bias(bias, stage, first_n);

        float scores[Traits::kScoreM][Traits::kPassN][4], dprobs[Traits::kScoreM][Traits::kPassN][4];
        const struct {
            const float *lse, *delta, *key_bias;
        } numbers{smem_.rows.lse, smem_.rows.delta, stage.bias};
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = bias[kBias == BiasKind::kDense ? m : 0][n + i / 2][i % 2];
        };
        const auto take = [&](int m, int h, int n, const float (&dx)[2], const bool (&is_visible)[2]) {
            const float dx0 = is_visible[0] ? dx[0] : 0, dx1 = is_visible[1] ? dx[1] : 0;
            if constexpr (kKeyBias) {
                key_sums_[(first_n + n) * 2] += dx0;
                key_sums_[(first_n + n) * 2 + 1] += dx1;
            } else if constexpr (kBias == BiasKind::kDense) {
                const int row = score_row_ + m * 16 + h * 8 + fragment_row();
                if (needs_dbias()) accumulate_dense_dbias(stage, row, first_n + n, dx0, dx1);
            }
        };
        using RowsA = FragmentsA<typename Traits::RowsTile, false>;
        using KeysB = FragmentsB<typename Traits::KeysTile, false>;
        recompute_p_ds<Traits, kBias>(
            scores, dprobs, p_, RowsA(address_of(smem_.rows.query), score_row_, 0),
            KeysB(address_of(k_of(tile)), first_key, 0), RowsA(address_of(smem_.rows.dout), score_row_, 0),
            KeysB(address_of(v_of(tile)), first_key, 0), numbers, dense_bias,
            [&] { return GatheredVisibility<Stage>{stage, score_row_, score_key_}; }, score_row_, first_key, rows, take,
            take);
        using ScoreC = SmemFragments<typename Traits::ScoresTile, MatrixOrder::kColMajor>;
        store_accumulator<T>(scores, ScoreC(address_of(smem_.probs[tile % 2]), score_row_, first_key));
        store_accumulator<T>(dprobs, ScoreC(address_of(smem_.dscores[tile % 2]), score_row_, first_key));
    }

    // Of this lane's pairs, straight from global memory; 0 where there is none.
    template <int kM>
    __device__ __forceinline__ void gather_bias(uint32_t (&bias)[kM][Traits::kPassN][2], const Stage& stage,
                                                int first_n) {
        const T* from = reinterpret_cast<const T*>(smem_.at.bias);
#pragma unroll
        for (int n = 0; n < Traits::kPassN; ++n) {
            const int2 keys = lane_positions(stage, first_n + n);
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int r = score_row_ + m * 16 + h * 8 + fragment_row();
                    const auto load = [&](int key) {
                        const bool exists = key >= 0 && r < tile_rows();
                        return exists ? to_float(from[r * p_.bias.row_stride + key * p_.bias.col_stride]) : 0.f;
                    };
                    bias[m][n][h] = pack<T>(load(keys.x), load(keys.y));
                }
        }
    }
    __device__ __forceinline__ int2 lane_positions(const Stage& stage, int n) const {
        return *reinterpret_cast<const int2*>(stage.key + score_key_ + n * 8 + fragment_col());
    }

    // dx of two pairs of row r of the tile.
    __device__ __forceinline__ void accumulate_dense_dbias(const Stage& stage, int r, int n, float dx0, float dx1) {
        if (r >= tile_rows()) return;
        const int2 keys = lane_positions(stage, n);
        const int64_t at = smem_.at.dense_dbias + r * p_.dbias.row_stride;
        if (accumulates_dbias()) {
            if (keys.x >= 0) reduce_add(p_.dbias_accum + at + keys.x, dx0);
            if (keys.y >= 0) reduce_add(p_.dbias_accum + at + keys.y, dx1);
        } else {
            T* to = static_cast<T*>(p_.dbias.data) + at;
            if (keys.x >= 0) to[keys.x] = T(dx0);
            if (keys.y >= 0) to[keys.y] = T(dx1);
        }
    }

    // The lanes' sums to the warp's: at each step two lanes share out what they hold, until there is a key a lane.
    __device__ __forceinline__ void store_key_sums(int tile) {
#pragma unroll
        for (int step = 16, half = kLaneKeys / 2; step >= 4; step /= 2, half /= 2) {
            if (half == 0) key_sums_[0] += __shfl_xor_sync(~0u, key_sums_[0], step);
            const bool upper = lane_id() & step;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float given = upper ? key_sums_[i] : key_sums_[i + half];
                const float opaque = upper ? key_sums_[i + half] : key_sums_[i];
                key_sums_[i] = opaque + __shfl_xor_sync(~0u, given, step);
            }
        }
        const int i = lane_id() * kLaneKeys / 32, key = score_key_ + i / 2 * 8 + fragment_col() + i % 2;
        smem_.key_sums[tile % 2][warp_id() / Traits::kScoreKeyWarps][key] = key_sums_[0];
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) key_sums_[j] = 0;
    }
    __device__ __forceinline__ void accumulate_key_dbias(int tile) {
        const int place = static_cast<int>(threadIdx.x) - (kThreads - kKeys);  // the first warps have keys to fetch
        if (place < 0) return;
        const int key = stage_of(tile).key[place];
        if (key < 0) return;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < Traits::kSizes.score_row_warps; ++w) sum += smem_.key_sums[tile % 2][w][place];
        reduce_add(smem_.at.key_dbias + key * p_.dbias.col_stride, sum);
    }

    // What P and dS of a tile add to dQ, dK and dV.
    __device__ __forceinline__ void accumulate_gradients(int tile) {
        const auto& dscores = smem_.dscores[tile % 2];
        warp_gemm<T, kKeys, kDqColStep>(
            dq_, FragmentsA<typename Traits::ScoresTile, false>(address_of(dscores), dq_row(), 0),
            FragmentsB<typename Traits::KeysTile, true>(address_of(k_of(tile)), 0, dq_col()));
        accumulate_dkv(tile, smem_.probs[tile % 2], smem_.rows.dout, smem_.at.dvalue);
        accumulate_dkv(tile, dscores, smem_.rows.query, smem_.at.dkey);
    }
    static constexpr int kDqColStep = Traits::kDqColWarps * 16, kDkvColStep = Traits::kDkvColWarps * 16;
    static __device__ int dq_row() { return warp_id() / Traits::kDqColWarps * Traits::kDqRows; }
    static __device__ int dq_col() { return warp_id() % Traits::kDqColWarps * 16; }

    // accum[keys] += pairs^T rows.
    __device__ __forceinline__ void accumulate_dkv(int tile, const typename Traits::ScoresTile& pairs,
                                                   const typename Traits::RowsTile& rows, float* accum) {
        const int first_key = warp_id() / Traits::kDkvColWarps * Traits::kDkvKeys;
        const int first_col = warp_id() % Traits::kDkvColWarps * 16;
        float acc[Traits::kDkvM][Traits::kDkvN][4];
        clear(acc);
        warp_gemm<T, kRows, kDkvColStep>(acc,
                                         FragmentsA<typename Traits::ScoresTile, true>(address_of(pairs), 0, first_key),
                                         FragmentsB<typename Traits::RowsTile, true>(address_of(rows), 0, first_col));

        const int64_t stride = p_.kv_heads * Traits::kHeadDim;
        const int* keys = stage_of(tile).key + first_key + fragment_row();
        accum += first_col + fragment_col();
#pragma unroll
        for (int i = 0; i < Traits::kDkvM * 2; ++i) {
            const int key = keys[i * 8];
            if (key < 0) continue;
            float* to = accum + key * stride;
#pragma unroll
            for (int n = 0; n < Traits::kDkvN; ++n) {
                const float* x = acc[i / 2][n] + i % 2 * 2;
                reduce_add(to + n / 2 * kDkvColStep + n % 2 * 8, x[0], x[1]);
            }
        }
    }

    // The first key that this tile has not added to yet.
    __device__ int32_t* progress_counter() const {
        return p_.progress_counters + smem_.tile.chain * GatherBwdTileScheduler(p_, kRows).length() + smem_.tile.place;
    }
    __device__ void wait_for_predecessor(int key) {
        if (smem_.tile.place == 0) return;
        while (predecessor_progress_ < key) predecessor_progress_ = load_acquire(progress_counter() - 1);
    }
    // Until the predecessor has added to every key that this turn adds to; what was added before has arrived.
    __device__ void wait_for_progress(int tile) {
        __threadfence();
        if (accumulates_dbias()) ++tile;
        if (threadIdx.x > 0 || tile < 0 || tile >= num_n_blocks_) return;
        const int last = smem_.list.keys[tile * kKeys + kKeys - 1];
        wait_for_predecessor(last < 0 ? INT32_MAX : last + 1);
    }
    __device__ void publish_progress(int tile) {
        if (threadIdx.x == 0 && tile > 0) store_release(progress_counter(), smem_.list.keys[tile * kKeys]);
    }
    __device__ void finish_progress() {
        __threadfence();
        __syncthreads();
        if (threadIdx.x > 0) return;
        wait_for_predecessor(INT32_MAX);
        store_release(progress_counter(), INT32_MAX);
    }

    __device__ void store_dq() {
        using Rows = SmemFragments<typename Traits::RowsTile, MatrixOrder::kColMajor>;
        store_accumulator<T, kDqColStep>(dq_, Rows(address_of(smem_.rows.query), dq_row(), dq_col()),
                                         static_cast<float>(p_.softmax_scale));
        __syncthreads();
        for (int i = 0; i < p_.tile_heads; ++i) {
            T* to = static_cast<T*>(p_.dquery.data) + query_offset(p_.dquery, sequence(), head() + i) +
                    first_row() * p_.dquery.row_stride;
            const int first = i * rows_per_head();
            copy_tile_out<kThreads>(smem_.rows.query, to, p_.dquery.row_stride, first + tile_rows(),
                                    static_cast<int>(p_.head_dim), first);
        }
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const sm80::SmemAddress address_of;
    const int score_row_, score_key_;  // where this warp's part of S and dP begins
    int num_n_blocks_ = 0;             // of the list
    int next_position_ = -1;           // the key that this thread fetches next
    int position_ = -1;                // the one that it has fetched, and what is known of it:
    uint4 visibility_data_{};
    float key_bias_ = 0;
    int predecessor_progress_ = 0;    // of thread 0: the predecessor's watermark, as last seen
    float key_sums_[kLaneKeys] = {};  // of dx, over this lane's rows
    float dq_[Traits::kDqM][Traits::kDqN][4];
};

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.blocks_per_sm)
    gather_bwd_kernel(const __grid_constant__ BwdArgs p) {
    if constexpr (!Traits::kIsUsed) return;
    if (is_inactive(p)) return;
    using Kernel = GatherBwd<Traits, kBias>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory);
    if (threadIdx.x == 0) {
        // Whoever waits for another tile holds a higher ticket: the other has begun.
        const GatherBwdTileScheduler all(p, Traits::kRows);
        const unsigned index =
            p.deterministic ? atomicAdd(p.progress_counters + all.chains * all.length(), 1) : blockIdx.x;
        smem.tile = GatherBwdWorkTile(p, Traits::kRows, index);
    }
    __syncthreads();
    // Of variable length; where deterministic, the next tile waits for it all the same.
    if (smem.tile.first_row >= smem.tile.s.rows && !p.deterministic) return;
    Kernel(p, smem).run();
}

}  // namespace flash_dmattn::cuda::sm80
