// The backward over key lists: one CTA owns an m_block and visits the n_blocks of its list.
//
// Q and dO stay in shared memory, dQ in registers. dK, dV and dbias of gathered keys are summed in global memory.
//
// A step of the mainloop recomputes P and dS of one n_block and runs the dQ, dK and dV GEMMs of the previous one:
// softmax and GEMMs overlap, and a step needs one barrier.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/sm80/bwd/scores.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "bwd_shared_storage.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits, BiasKind kBias>
class GatherBwdKernel {
public:
    using T = typename Traits::T;
    static constexpr int kKeys = Traits::kKeys, kRows = Traits::kRows, kThreads = Traits::kThreads;
    static constexpr bool kKeyBias = kBias == BiasKind::kKey;
    static constexpr int kLaneKeys = Traits::kScoreN * 2;  // keys of S and dP that a lane holds
    static_assert(kKeys == KeyListsView::kAlign && KeyListsView::kRows % kRows == 0 && Traits::kScoreKeys <= 32);

    using SharedStorage = GatherBwdSharedStorage<Traits>;

    // smem.work_tile has been written.
    __device__ GatherBwdKernel(const BwdArgs& p, SharedStorage& smem)
        : p_(p), smem_(smem), address_of(&smem), score_row_(warp_id() / Traits::kScoreKeyWarps * Traits::kScoreRows),
          score_key_(warp_id() % Traits::kScoreKeyWarps * Traits::kScoreKeys) {
        if (threadIdx.x == 0) {
            smem.list = KeyList(p, sequence(), first_head(), first_row());
            smem.pointers = GatherPointers<T>(p, sequence(), first_head(), first_row());
        }
        __syncthreads();
        if (num_rows() <= 0) return;
        num_n_blocks_ = smem.list.template count_n_blocks<kKeys>(p, sequence(), first_row() + num_rows());
    }

    __device__ void run() {
        clear(dq_);
        const HeadPointers<T> rows(p_, sequence(), first_head());
        packs_heads() ? load_packed_heads(rows)
                      : load_qdo_stage(smem_.qdo, address_of, p_, sequence(), rows, first_row(), num_rows(), 0);
        next_position_ = list_position(0);
        for (int n_block = 0; n_block < 2; ++n_block) {
            fetch_positions(n_block);
            store_keys(n_block);
        }
        __syncthreads();
        load_kv(0);
        wait_for_qdo(smem_.qdo, score_rows());

        // Ping-pong: the two warps of a scheduler run the halves of a step in different order; one's GEMMs overlap the
        // other's softmax.
        const bool scores_first = warp_id() < kThreads / 64;
        for (int n_block = -1; n_block < num_n_blocks_; ++n_block) {
            if (p_.deterministic) wait_for_progress(n_block);
            cp_async_wait<0>();
            __syncthreads();  // P and dS of n_block are complete, K and V of the next one are loaded
            if (p_.deterministic) publish_progress(n_block);
            if (SharedStorage::kPrefetchesKv) load_kv(n_block + 2);
            fetch_positions(n_block + 3);
            if (kKeyBias && needs_dbias() && n_block >= 0) accumulate_key_dbias(n_block);
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                if ((half == 0) == scores_first) {
                    if (n_block + 1 < num_n_blocks_) compute_scores(n_block + 1);
                } else if (n_block >= 0) {
                    accumulate_gradients(n_block);
                }
            }
            store_keys(n_block + 3);
            if (!SharedStorage::kPrefetchesKv) {
                __syncthreads();
                load_kv(n_block + 2);
            }
        }
        if (p_.deterministic) finish_progress();
        __syncthreads();
        store_dq();
    }

private:
    using Stage = GatheredKeyStage<kRows, kKeys>;

    __device__ const Sequence& sequence() const { return smem_.work_tile.sequence; }
    __device__ int first_head() const { return smem_.work_tile.first_head; }
    __device__ int first_row() const { return smem_.work_tile.first_row; }
    __device__ int num_rows() const {
        return min(sequence().rows - first_row(), GatherBwdTileScheduler::block_m(p_, kRows));
    }
    // pack-GQA: each of two heads has rows_per_head() rows of the m_block, of which num_rows() exist.
    __device__ bool packs_heads() const { return p_.qheads_per_tile > 1; }
    __device__ int rows_per_head() const { return packs_heads() ? kRows / 2 : kRows; }
    // Rows from here on are masked without reading the visibility bits.
    __device__ int score_rows() const { return packs_heads() ? kRows : num_rows(); }
    __device__ bool needs_dbias() const { return p_.dbias.data != nullptr; }
    __device__ bool accumulates_dbias() const { return kBias == BiasKind::kDense && p_.dbias_accum_size > 0; }
    __device__ const Stage& stage_of(int n_block) const { return smem_.keys[n_block % SharedStorage::kPositionStages]; }
    __device__ const typename Traits::KvTile& k_of(int n_block) const {
        return smem_.key[n_block % SharedStorage::kKStages];
    }
    __device__ const typename Traits::KvTile& v_of(int n_block) const {
        return smem_.value[n_block % SharedStorage::kVStages];
    }

    // Position of this thread's key in an n_block of the list; -1 for none.
    __device__ int list_position(int n_block) const {
        return threadIdx.x < kKeys && n_block < num_n_blocks_ ? smem_.list.key(n_block * kKeys + threadIdx.x) : -1;
    }

    // Fetches visibility and bias of one key per thread into registers; store_keys() writes them after the GEMMs.
    __device__ __forceinline__ void fetch_positions(int n_block) {
        if (threadIdx.x >= kKeys) return;
        position_ = next_position_;
        next_position_ = list_position(n_block + 1);
        if (!is_key(position_, sequence().keys)) position_ = -1;
        if (position_ < 0) return;
        visibility_data_ = smem_.list.fetch(n_block * kKeys + threadIdx.x, position_);
        if constexpr (kKeyBias) {
            const KeyBiasBits bits = load_key_bias(p_.bias, smem_.pointers.bias, position_ * p_.bias.col_stride);
            key_bias_ = key_bias_of<T>(p_.bias, bits);
        }
    }
    // K and V of keys that no row of the m_block sees may hold NaN; position -1 excludes them from here on.
    __device__ __forceinline__ void store_keys(int n_block) {
        if (threadIdx.x >= kKeys) return;
        Stage& stage = smem_.keys[n_block % SharedStorage::kPositionStages];
        VisibleRows visible_rows = smem_.list.visible_rows(visibility_data_, position_, sequence(), p_.is_causal);
        if (position_ < 0 || (kKeyBias && key_bias_ == -kInfinity)) visible_rows.end = 0;
        uint32_t any = 0;
#pragma unroll
        for (int w = 0; w < Stage::kWords; ++w) {
            const uint32_t rows = visible_rows.from(first_row() + w * 32 % rows_per_head());
            stage.rows[w][threadIdx.x] = rows;
            any |= rows;
            const uint32_t seen_by_all = __ballot_sync(~0u, rows == bits_below(score_rows(), w));
            if (lane_id() == 0) stage.seen_by_all[w][warp_id()] = seen_by_all;
        }
        stage.position[threadIdx.x] = any != 0 ? position_ : -1;
        stage.bias[threadIdx.x] = any != 0 ? key_bias_ * kLog2E : 0;
    }

    // load_qdo_stage for packed heads; rows that do not exist become zeros.
    __device__ __forceinline__ void load_packed_heads(const HeadPointers<T>& head) {
        using Copy = RowCopy<kThreads, typename Traits::RowsTile>;
        const auto load = [&](const typename Traits::RowsTile& to, const T* from, const RowsView& view) {
            const uint32_t lane = address_of(to) + Traits::RowsTile::offset(Copy::first_row(), Copy::chunk()) * 2;
            Copy::start(lane, static_cast<int>(p_.head_dim), [&](int i) {
                const int at = Copy::first_row() + i * Copy::kRowsAtOnce, row = at % rows_per_head();
                return RowSource<T>{
                    from + at / rows_per_head() * view.head_stride + (first_row() + row) * view.row_stride,
                    row < num_rows()};
            });
        };
        load(smem_.qdo.query, head.query, p_.query);
        load(smem_.qdo.dout, head.dout, p_.dout);
        const int at = threadIdx.x, row = at % rows_per_head();
        if (at >= kRows) return;
        if (row < num_rows()) {
            const auto load_stat = [&](float& to, const float* from, const RowStatView& view) {
                cp_async<4>(smem_address(&to), from + at / rows_per_head() * view.head_stride + first_row() + row);
            };
            load_stat(smem_.qdo.lse[at], head.lse, p_.lse);
            load_stat(smem_.qdo.delta[at], head.delta, p_.delta);
        } else {
            smem_.qdo.lse[at] = smem_.qdo.delta[at] = 0;
        }
    }

    // Gathers K and V; stage_of(n_block) has been stored.
    __device__ __forceinline__ void load_kv(int n_block) {
        if (n_block < num_n_blocks_) {
            gather(smem_.key[n_block % SharedStorage::kKStages], smem_.pointers.key, p_.key.row_stride,
                   stage_of(n_block));
            gather(smem_.value[n_block % SharedStorage::kVStages], smem_.pointers.value, p_.value.row_stride,
                   stage_of(n_block));
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void gather(typename Traits::KvTile& to, const T* from, int64_t row_stride,
                                           const Stage& stage) {
        using Copy = RowCopy<kThreads, typename Traits::KvTile>;
        const uint32_t lane = address_of(to) + Traits::KvTile::offset(Copy::first_row(), Copy::chunk()) * 2;
        Copy::start(lane, static_cast<int>(p_.head_dim), [&](int i) {
            const int key = stage.position[Copy::first_row() + i * Copy::kRowsAtOnce];
            return RowSource<T>{from + key * row_stride, key >= 0};
        });
    }

    __device__ __forceinline__ void compute_scores(int n_block) {
        const bool needs_dx = needs_dbias() || p_.drelative_bias != nullptr;
#pragma unroll 1
        for (auto gradient = first_gradient(p_, needs_dx);; gradient = ScoreGradient::kDs) {
#pragma unroll
            for (int pass = 0; pass < Traits::kPasses; ++pass) compute_scores(n_block, pass, gradient);
            if (gradient == ScoreGradient::kDs) break;
        }
        if (kKeyBias && needs_dbias()) store_key_sums(n_block);
    }

    // Recomputes P and a gradient of the scores of one pass's keys. Adds dx to the gradients of the biases, and stores
    // P and dS rounded.
    __device__ __forceinline__ void compute_scores(int n_block, int pass, ScoreGradient gradient) {
        const Stage& stage = stage_of(n_block);
        const int first_n = pass * Traits::kPassN, first_key = score_key_ + first_n * 8, rows = score_rows();
        uint32_t bias[kBias == BiasKind::kDense ? Traits::kScoreM : 1][Traits::kPassN][2];
        if constexpr (kBias == BiasKind::kDense) gather_bias(bias, stage, first_n);

        float scores[Traits::kScoreM][Traits::kPassN][4], dprobs[Traits::kScoreM][Traits::kPassN][4];
        const struct {
            const float *lse, *delta, *key_bias;
        } row_stats{smem_.qdo.lse, smem_.qdo.delta, stage.bias};
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = bias[kBias == BiasKind::kDense ? m : 0][n + i / 2][i % 2];
        };
        const auto adjust_scores = [&](auto& s, auto& dp) {
            apply_softcap_and_relative_bias(
                s, dp, p_, sequence(), relative_bias_entries<true>(p_, sequence().batch, first_head()), gradient,
                [&](int i) { return lane_row(i); },
                [&](int n, int e) { return stage.position[first_key + n * 8 + fragment_col() + e]; });
        };
        using ScoreA = FragmentsA<typename Traits::RowsTile, Major::kK>;
        using ScoreB = FragmentsB<typename Traits::KvTile, Major::kK>;
        recompute_p_ds<Traits, kBias, true>(
            scores, dprobs, p_, ScoreA(address_of(smem_.qdo.query), score_row_, 0),
            ScoreB(address_of(k_of(n_block)), first_key, 0), ScoreA(address_of(smem_.qdo.dout), score_row_, 0),
            ScoreB(address_of(v_of(n_block)), first_key, 0), row_stats, dense_bias, adjust_scores,
            [&] { return GatheredVisibility<Stage>{stage, score_row_, score_key_}; }, score_row_, first_key, rows);
        if (is_dx(p_, gradient)) add_dx(stage, dprobs, first_n);
        if (gradient == ScoreGradient::kDx) return;
        using ScoreC = SmemFragments<typename Traits::ScoresTile, MatrixOrder::kColMajor>;
        store_accumulator<T>(
            scores, ScoreC(address_of(smem_.probs[n_block % SharedStorage::kScoreStages]), score_row_, first_key));
        store_accumulator<T>(
            dprobs, ScoreC(address_of(smem_.dscores[n_block % SharedStorage::kScoreStages]), score_row_, first_key));
    }
    // The row, in the sequence, of this lane's row i of an accumulator: 8 rows further than row i - 1.
    __device__ int lane_row(int i) const {
        return first_row() + (score_row_ + i * 8 + fragment_row()) % rows_per_head();
    }

    // Adds dx of one pass to the gradients of the biases.
    __device__ __forceinline__ void add_dx(const Stage& stage, const float (&dx)[Traits::kScoreM][Traits::kPassN][4],
                                           int first_n) {
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kPassN; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float dx0 = dx[m][n][2 * h], dx1 = dx[m][n][2 * h + 1];
                    if constexpr (kKeyBias) {
                        key_sums_[(first_n + n) * 2] += dx0;
                        key_sums_[(first_n + n) * 2 + 1] += dx1;
                    } else if constexpr (kBias == BiasKind::kDense) {
                        const int row = score_row_ + m * 16 + h * 8 + fragment_row();
                        if (needs_dbias()) accumulate_dense_dbias(stage, row, first_n + n, dx0, dx1);
                    }
                }
        if (p_.drelative_bias != nullptr) add_relative_bias_gradient(stage, dx, first_n);
    }
    __device__ __forceinline__ void add_relative_bias_gradient(const Stage& stage,
                                                               const float (&dx)[Traits::kScoreM][Traits::kPassN][4],
                                                               int first_n) const {
        const RelativeBiasGradientOf<true> gradient(p_, sequence(), first_head());
#pragma unroll
        for (int i = 0; i < Traits::kScoreM * 2; ++i) {
            const int row = gradient.row_part(lane_row(i));
#pragma unroll
            for (int n = 0; n < Traits::kPassN; ++n) {
                const int2 keys = lane_positions(stage, first_n + n);
                const float* x = dx[i / 2][n] + i % 2 * 2;
                if (x[0] != 0) gradient.add(row + gradient.key_part(keys.x), x[0]);
                if (x[1] != 0) gradient.add(row + gradient.key_part(keys.y), x[1]);
            }
        }
    }

    // Loads the dense bias of this lane's scores from global memory; 0 where row or key does not exist.
    template <int kM>
    __device__ __forceinline__ void gather_bias(uint32_t (&bias)[kM][Traits::kPassN][2], const Stage& stage,
                                                int first_n) {
        const T* from = reinterpret_cast<const T*>(smem_.pointers.bias);
#pragma unroll
        for (int n = 0; n < Traits::kPassN; ++n) {
            const int2 keys = lane_positions(stage, first_n + n);
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int r = score_row_ + m * 16 + h * 8 + fragment_row();
                    const auto load = [&](int key) {
                        const bool exists = key >= 0 && r < num_rows();
                        return exists ? to_float(from[r * p_.bias.row_stride + key * p_.bias.col_stride]) : 0.f;
                    };
                    bias[m][n][h] = pack<T>(load(keys.x), load(keys.y));
                }
        }
    }
    __device__ __forceinline__ int2 lane_positions(const Stage& stage, int n) const {
        return *reinterpret_cast<const int2*>(stage.position + score_key_ + n * 8 + fragment_col());
    }

    // Stores or adds dx of two scores of row r of the m_block.
    __device__ __forceinline__ void accumulate_dense_dbias(const Stage& stage, int r, int n, float dx0, float dx1) {
        if (r >= num_rows()) return;
        const int2 keys = lane_positions(stage, n);
        const int64_t at = smem_.pointers.dense_dbias + r * p_.dbias.row_stride;
        if (accumulates_dbias()) {
            if (keys.x >= 0) reduce_add(p_.dbias_accum + at + keys.x, dx0);
            if (keys.y >= 0) reduce_add(p_.dbias_accum + at + keys.y, dx1);
        } else {
            T* to = static_cast<T*>(p_.dbias.data) + at;
            if (keys.x >= 0) to[keys.x] = T(dx0);
            if (keys.y >= 0) to[keys.y] = T(dx1);
        }
    }

    // Reduces the key sums over the lanes of a warp: each step halves the keys that a lane holds, down to one.
    __device__ __forceinline__ void store_key_sums(int n_block) {
#pragma unroll
        for (int step = 16, half = kLaneKeys / 2; step >= 4; step /= 2, half /= 2) {
            if (half == 0) key_sums_[0] += __shfl_xor_sync(~0u, key_sums_[0], step);
            const bool upper = lane_id() & step;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const float sent = upper ? key_sums_[i] : key_sums_[i + half];
                const float kept = upper ? key_sums_[i + half] : key_sums_[i];
                key_sums_[i] = kept + __shfl_xor_sync(~0u, sent, step);
            }
        }
        const int i = lane_id() * kLaneKeys / 32, key = score_key_ + i / 2 * 8 + fragment_col() + i % 2;
        smem_.key_sums[n_block % SharedStorage::kScoreStages][warp_id() / Traits::kScoreKeyWarps][key] = key_sums_[0];
#pragma unroll
        for (int j = 0; j < kLaneKeys; ++j) key_sums_[j] = 0;
    }
    __device__ __forceinline__ void accumulate_key_dbias(int n_block) {
        const int at = static_cast<int>(threadIdx.x) - (kThreads - kKeys);  // the other warps fetch keys
        if (at < 0) return;
        const int key = stage_of(n_block).position[at];
        if (key < 0) return;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < Traits::kSizes.score_row_warps; ++w)
            sum += smem_.key_sums[n_block % SharedStorage::kScoreStages][w][at];
        reduce_add(smem_.pointers.key_dbias + key * p_.dbias.col_stride, sum);
    }

    // dQ += dS K in registers; dV += P^T dO and dK += dS^T Q in global memory.
    __device__ __forceinline__ void accumulate_gradients(int n_block) {
        const auto& dscores = smem_.dscores[n_block % SharedStorage::kScoreStages];
        warp_gemm<T, kKeys, kDqColStep>(
            dq_, FragmentsA<typename Traits::ScoresTile, Major::kK>(address_of(dscores), dq_row(), 0),
            FragmentsB<typename Traits::KvTile, Major::kMN>(address_of(k_of(n_block)), 0, dq_col()));
        accumulate_dkv(n_block, smem_.probs[n_block % SharedStorage::kScoreStages], smem_.qdo.dout,
                       smem_.pointers.dvalue);
        accumulate_dkv(n_block, dscores, smem_.qdo.query, smem_.pointers.dkey);
    }
    static constexpr int kDqColStep = Traits::kDqColWarps * 16, kDkvColStep = Traits::kDkvColWarps * 16;
    static __device__ int dq_row() { return warp_id() / Traits::kDqColWarps * Traits::kDqRows; }
    static __device__ int dq_col() { return warp_id() % Traits::kDqColWarps * 16; }

    // accum[positions] += scores^T rows.
    __device__ __forceinline__ void accumulate_dkv(int n_block, const typename Traits::ScoresTile& scores,
                                                   const typename Traits::RowsTile& rows, float* accum) {
        const int first_key = warp_id() / Traits::kDkvColWarps * Traits::kDkvKeys;
        const int first_col = warp_id() % Traits::kDkvColWarps * 16;
        float acc[Traits::kDkvM][Traits::kDkvN][4];
        clear(acc);
        warp_gemm<T, kRows, kDkvColStep>(
            acc, FragmentsA<typename Traits::ScoresTile, Major::kMN>(address_of(scores), 0, first_key),
            FragmentsB<typename Traits::RowsTile, Major::kMN>(address_of(rows), 0, first_col));

        const int64_t stride = p_.kv_heads * Traits::kHeadDim;
        const int* positions = stage_of(n_block).position + first_key + fragment_row();
        accum += first_col + fragment_col();
#pragma unroll
        for (int i = 0; i < Traits::kDkvM * 2; ++i) {
            const int key = positions[i * 8];
            if (key < 0) continue;
            float* to = accum + key * stride;
#pragma unroll
            for (int n = 0; n < Traits::kDkvN; ++n) {
                const float* x = acc[i / 2][n] + i % 2 * 2;
                reduce_add(to + n / 2 * kDkvColStep + n % 2 * 8, x[0], x[1]);
            }
        }
    }

    // deterministic: the first key that this work tile has not added to yet.
    __device__ int32_t* progress_counter() const {
        return p_.progress_counters + smem_.work_tile.chain * GatherBwdTileScheduler(p_, kRows).chain_length() +
               smem_.work_tile.chain_idx;
    }
    __device__ void wait_for_predecessor(int key) {
        if (smem_.work_tile.chain_idx == 0) return;
        while (predecessor_progress_ < key) predecessor_progress_ = load_acquire(progress_counter() - 1);
    }
    // Waits until the predecessor in the chain has added to every key of this step.
    __device__ void wait_for_progress(int n_block) {
        __threadfence();
        if (accumulates_dbias()) ++n_block;
        if (threadIdx.x > 0 || n_block < 0 || n_block >= num_n_blocks_) return;
        const int last = smem_.list.keys[n_block * kKeys + kKeys - 1];
        wait_for_predecessor(last < 0 ? INT32_MAX : last + 1);
    }
    __device__ void publish_progress(int n_block) {
        if (threadIdx.x == 0 && n_block > 0) store_release(progress_counter(), smem_.list.keys[n_block * kKeys]);
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
        store_accumulator<T, kDqColStep>(dq_, Rows(address_of(smem_.qdo.query), dq_row(), dq_col()),
                                         static_cast<float>(p_.softmax_scale));
        __syncthreads();
        for (int i = 0; i < p_.qheads_per_tile; ++i) {
            T* to = query_rows<T>(p_.dquery, sequence(), first_head() + i) + first_row() * p_.dquery.row_stride;
            const int first = i * rows_per_head();
            copy_tile_out<kThreads>(smem_.qdo.query, to, p_.dquery.row_stride, first + num_rows(),
                                    static_cast<int>(p_.head_dim), first);
        }
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const SmemAddress address_of;
    const int score_row_, score_key_;  // this warp's first row and key of S and dP
    int num_n_blocks_ = 0;             // of the list
    int next_position_ = -1;           // of the key that this thread fetches next
    int position_ = -1;                // of the key that it has fetched; its visibility and bias:
    uint4 visibility_data_{};
    float key_bias_ = 0;
    int predecessor_progress_ = 0;    // thread 0: the predecessor's progress, as last read
    float key_sums_[kLaneKeys] = {};  // of dx over this lane's rows
    float dq_[Traits::kDqM][Traits::kDqN][4];
};

template <typename Traits, BiasKind kBias>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.ctas_per_sm)
    gather_bwd_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if constexpr (!Traits::kIsUsed) return;
    if (is_inactive(p)) return;
    using Kernel = GatherBwdKernel<Traits, kBias>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory);
    if (threadIdx.x == 0) {
        // Work indices rise along a chain, so a CTA waits only for CTAs that have started.
        const unsigned index = p.deterministic ? atomicAdd(p.tile_count_semaphore, 1) : blockIdx.x;
        smem.work_tile = GatherBwdWorkTile(p, Traits::kRows, index);
    }
    __syncthreads();
    // Empty with variable length; deterministic, the successor still waits for its progress.
    if (smem.work_tile.first_row >= smem.work_tile.sequence.rows && !p.deterministic) return;
    Kernel(p, smem).run();
}

}  // namespace flash_dmattn::cuda::sm80
