// The backward's main kernel: dK, dV of one tile of keys, and that tile's part of dQ and of the bias's gradient.
//
// A block owns a tile of keys of one key/value head and visits the tiles of query rows that see it, of every query head
// of the group. dK and dV stay in registers. dQ is summed in global memory in float32, in the order in which registers
// hold it (see dquery_accum in plan.h), so that every addition is 16 bytes a thread and 512 a warp.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "block.cuh"
#include "cuda/sm80/dbias/writers.cuh"
#include "workspace.cuh"

namespace flash_dmattn::cuda::sm80 {

// In deterministic mode the blocks of one head add to a tile of dQ in the order of their keys.
__device__ __forceinline__ void wait_for_turn(const int32_t* turns, int turn) {
    if (threadIdx.x == 0) {
        while (load_acquire(turns) != turn) {}
    }
    __syncthreads();
}
__device__ __forceinline__ void end_turn(int32_t* turns) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

// Arrays are locals of run(), not members: see BwdBlock. `seen`, which the compiler leaves in memory, is none of the
// functions that run() calls either: it would share that memory with the main loop's arrays, and keep them there, too.
template <typename Traits, BiasKind kBias, bool kCausal>
class Bwd {
public:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;
    using DbiasWriter = typename DbiasWriterOf<Traits, kBias, kCausal>::Type;

    // smem.sequence has been written, and has keys in this tile of them. group: query heads of a key/value head.
    __device__ Bwd(const BwdArgs& p, SharedStorage& smem, int group, int n_block, int kv_head)
        : p_(p), smem_(smem), block_(p, smem, group, n_block, kv_head), address_of(block_.address_of) {
        const int dq_row = warp_id() / Traits::kDqColWarps * Traits::kDqRows,
                  dq_col = warp_id() % Traits::kDqColWarps * 16;
        const auto keep = [&](LaneOffset which, uint32_t offset) { smem.lane_offsets[which][threadIdx.x] = offset; };
        keep(kScoreRows, ScoreRows::lane_offset(block_.score_row, 0));
        keep(kScoreKeys, ScoreKeys::lane_offset(block_.score_key, 0));
        keep(kScorePairs, Pairs::lane_offset(block_.score_row, block_.score_key));
        keep(kDkvPairs, DkvPairs::lane_offset(0, dkv_key()));
        keep(kDkvRows, DkvRows::lane_offset(0, dkv_col()));
        keep(kDqPairs, DqPairs::lane_offset(dq_row, 0));
        keep(kDqKeys, DqKeys::lane_offset(0, dq_col));
        lane_offsets_ = opaque(address_of(smem.lane_offsets) + threadIdx.x * 2);
    }

    __device__ __forceinline__ void run() {
        DkvSum dkey, dvalue;
        clear(dkey);
        clear(dvalue);
        typename DbiasWriter::Sums dbias_sums;
        DbiasWriter dbias(block_, dbias_sums);
        dbias.begin();
        auto cursor = block_.template cursor<kCausal>();
        bool more = cursor.next();
        if (more) {
            find_head(cursor.head());
            load_rows(0, cursor.m_block());
        }
        uint32_t seen[Traits::kWords];
        find_seen_keys(seen);
        load_keys(smem_.key, p_.key, seen);
        load_keys(smem_.value, p_.value, seen);
        cp_async_commit();

        for (int stage = 0; more; stage ^= 1) {
            const RowTileVisit visit{stage, cursor.head(), cursor.m_block(), cursor.mask_full()};
            wait_for_rows(smem_.rows[stage], block_.rows_from(visit.m_block));
            dbias.begin_tile();
            more = cursor.next();
            const bool ends_head = !more || cursor.head() != visit.head;
            if (more) {
                if (ends_head) find_head(cursor.head());
                load_rows(stage ^ 1, cursor.m_block());
            }

            auto& probs = probs_of(visit);
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) make_pass(visit, probs, pass * kPassN, dbias);
            __syncthreads();
            add_pairs_by_rows(dvalue, probs, smem_.rows[stage].dout);
            add_dquery(visit);
            add_pairs_by_rows(dkey, smem_.dscores, smem_.rows[stage].query);
            dbias.end_tile(visit);
            if (ends_head) dbias.end_head(visit.head, more, cursor);
        }
        dbias.end();

        cp_async_wait<0>();
        __syncthreads();
        store_keys(dkey, smem_.key, p_.dkey, static_cast<float>(p_.softmax_scale));
        store_keys(dvalue, smem_.value, p_.dvalue, 1.f);
    }

private:
    static constexpr bool kKeyBias = SharedStorage::kKeyBias;
    static constexpr int kPasses = Traits::template kPassesWith<kBias>, kPassN = Traits::kScoreN / kPasses;
    static constexpr int kDkvColStep = Traits::kDkvColWarps * 16, kDqColStep = Traits::kDqColWarps * 16;
    using DkvSum = float[Traits::kDkvM][Traits::kDkvN][4];
    using ScoreRows = OperandA<typename Traits::RowsTile, false>;
    using ScoreKeys = OperandB<typename Traits::KeysTile, false>;
    using Pairs = Blocks<typename Traits::ScoresTile, BlockOrder::kBelowFirst>;
    using DkvPairs = OperandA<typename Traits::ScoresTile, true>;
    using DkvRows = OperandB<typename Traits::RowsTile, true>;
    using DqPairs = OperandA<typename Traits::ScoresTile, false>;
    using DqKeys = OperandB<typename Traits::KeysTile, true>;
    using Keys = Blocks<typename Traits::KeysTile, BlockOrder::kBelowFirst>;

    __device__ const Sequence& sequence() const { return block_.sequence(); }
    static __device__ int dkv_key() { return warp_id() / Traits::kDkvColWarps * Traits::kDkvKeys; }
    static __device__ int dkv_col() { return warp_id() % Traits::kDkvColWarps * 16; }
    __device__ __forceinline__ uint32_t lane_offset(LaneOffset which) const {
        return load_shared_u16(lane_offsets_ + which * Traits::kThreads * 2);
    }
    __device__ typename Traits::ScoresTile& probs_of(const RowTileVisit& visit) const {
        return smem_.probs[SharedStorage::kProbStages == 2 ? visit.stage : 0];
    }

    // Keys that no row sees, for the mask or their bias, may hold anything: they are not read. A warp looks at 32
    // tiles at a time, one a lane.
    __device__ __forceinline__ void find_seen_keys(uint32_t (&seen)[Traits::kWords]) const {
        const Sequence& s = sequence();
        const int first_head = block_.first_head, end_head = first_head + block_.group;
        const bool is_masked = has_mask(p_);
#pragma unroll
        for (int w = 0; w < Traits::kWords; ++w) seen[w] = 0;
        const int num_m_blocks = is_masked ? ceil_div(s.rows, Traits::kRows) : 0;
        for (int head = first_head; head < end_head; ++head) {
            uint32_t seen_by_head[Traits::kWords];
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) seen_by_head[w] = is_masked ? 0 : ~0u;
            const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, s, head);
            for (int tile = lane_id(); tile < num_m_blocks; tile += 32) {
                const int first_row = tile * Traits::kRows;
                const auto summary = masks.of(first_row, min(first_row + Traits::kRows, s.rows) - 1, block_.n_block);
#pragma unroll
                for (int w = 0; w < Traits::kWords; ++w) seen_by_head[w] |= summary.columns[w];
            }
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) {
                uint32_t unhidden = ~0u;
                if constexpr (kKeyBias)
                    unhidden = __ballot_sync(
                        ~0u, load_key_bias<T>(p_, s, head, block_.first_key + w * 32 + lane_id()) != -kInfinity);
                seen[w] |= __reduce_or_sync(~0u, seen_by_head[w]) & unhidden;
            }
        }
    }
    __device__ __forceinline__ T* first_key_of(const RowsView& view) const {
        return static_cast<T*>(view.data) + key_offset(view, sequence(), block_.kv_head) +
               block_.first_key * view.row_stride;
    }
    __device__ __forceinline__ void load_keys(typename Traits::KeysTile& tile, const RowsView& view,
                                              const uint32_t (&seen)[Traits::kWords]) const {
        const T* from = first_key_of(view);
        copy_rows_async<Traits::kThreads>(tile, static_cast<int>(p_.head_dim), [&](int key) -> const T* {
            uint32_t word = seen[0];
#pragma unroll
            for (int w = 1; w < Traits::kWords; ++w) word = key / 32 == w ? seen[w] : word;
            return block_.first_key + key < sequence().keys && word >> (key % 32) & 1 ? from + key * view.row_stride
                                                                                      : nullptr;
        });
    }

    __device__ __forceinline__ void find_head(int head) {
        __syncwarp();
        if (lane_id() == 0) smem_.head_rows[warp_id()] = HeadRows<T>(p_, sequence(), head);
        if (kBias == BiasKind::kDense && lane_id() == 1) smem_.head_bias[warp_id()] = HeadBias<T>(p_, sequence(), head);
        __syncwarp();
        if (kKeyBias && threadIdx.x < Traits::kKeys)
            key_bias_ = load_key_bias<T>(p_, sequence(), head, block_.first_key + threadIdx.x);
    }
    __device__ __forceinline__ void load_rows(int stage, int m_block) const {
        load_row_stage(smem_.rows[stage], address_of, p_, sequence(), smem_.head_rows[warp_id()],
                       m_block * Traits::kRows, block_.rows_from(m_block), block_.n_block);
        if constexpr (kBias == BiasKind::kDense)
            load_bias<Traits>(smem_.probs[stage], address_of, p_, sequence(), smem_.head_bias[warp_id()], m_block,
                              block_.n_block);
        if (kKeyBias && threadIdx.x < Traits::kKeys) smem_.rows[stage].key_bias[threadIdx.x] = key_bias_;
        cp_async_commit();
    }

    // P and dS of one pass over the tile, of this warp's columns of blocks from first_n on, rounded, to shared memory.
    __device__ __forceinline__ void make_pass(const RowTileVisit& visit, typename Traits::ScoresTile& probs,
                                              int first_n, DbiasWriter& dbias) const {
        const auto& rows = smem_.rows[visit.stage];
        const int score_row = block_.score_row, score_key = block_.score_key + first_n * 8;
        float scores[Traits::kScoreM][kPassN][4], dprobs[Traits::kScoreM][kPassN][4];
        const uint32_t rows_at = lane_offset(kScoreRows);
        const uint32_t keys_at = lane_offset(kScoreKeys) + first_n * 8 * ScoreKeys::kRowBytes;
        const int rows_left = block_.rows_from(visit.m_block);
        const uint32_t pairs_at = lane_offset(kScorePairs);
        // Of the bias, before it is of P.
        const Pairs prob_blocks = Pairs(address_of(probs), pairs_at).from(0, first_n * 8);
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
            prob_blocks.template load<false>(to, m * 16, n * 8);
        };
        const auto take = [&](int, int, int n, const float (&dx)[2], const bool (&is_visible)[2]) {
            dbias.take(first_n + n, dx, is_visible);
        };
        const int lane = opaque(lane_id());
        const auto take_capped = [&](int m, int h, int n, const float (&dx)[2], const bool (&is_visible)[2]) {
            dbias.take_capped(visit, first_n + n, score_row + m * 16 + h * 8, score_key + n * 8, rows_left, lane, dx,
                              is_visible);
        };
        const auto make_visibility = [&] {
            return BlockVisibility<Traits::kRows, Traits::kKeys, kCausal>(p_, sequence(), rows, visit.m_block,
                                                                          block_.n_block, visit.mask_full);
        };
        differentiate_pass<Traits, kBias>(
            scores, dprobs, p_, ScoreRows(address_of(rows.query), rows_at), ScoreKeys(address_of(smem_.key), keys_at),
            ScoreRows(address_of(rows.dout), rows_at), ScoreKeys(address_of(smem_.value), keys_at), rows, dense_bias,
            make_visibility, score_row, score_key, rows_left, take, take_capped);
        dbias.take_pass(visit, dprobs, first_n);
        store_rounded<T>(scores, prob_blocks);
        store_rounded<T>(dprobs, Pairs(address_of(smem_.dscores), pairs_at).from(0, first_n * 8));
    }

    // dV += P^T dO, and dK += dS^T Q.
    __device__ __forceinline__ void add_pairs_by_rows(DkvSum& sum, const typename Traits::ScoresTile& pairs,
                                                      const typename Traits::RowsTile& rows) const {
        multiply_add<T, Traits::kRows, kDkvColStep>(sum, DkvPairs(address_of(pairs), lane_offset(kDkvPairs)),
                                                    DkvRows(address_of(rows), lane_offset(kDkvRows)));
    }
    // dQ += dS K.
    __device__ __forceinline__ void add_dquery(const RowTileVisit& visit) const {
        float dquery[Traits::kDqM][Traits::kDqN][4];
        clear(dquery);
        multiply_add<T, Traits::kKeys, kDqColStep>(dquery, DqPairs(address_of(smem_.dscores), lane_offset(kDqPairs)),
                                                   DqKeys(address_of(smem_.key), lane_offset(kDqKeys)));
        const int64_t tile = dquery_tile<Traits::kRows>(p_, sequence(), visit.head, visit.m_block);
        float* to = p_.dquery_accum + tile * Traits::kRows * Traits::kHeadDim + threadIdx.x * 4;
        if (p_.deterministic) wait_for_turn(p_.dquery_semaphore + tile, block_.n_block);
#pragma unroll
        for (int m = 0; m < Traits::kDqM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kDqN; ++n)
                reduce_add(to + (m * Traits::kDqN + n) * Traits::kThreads * 4, dquery[m][n]);
        if (p_.deterministic) end_turn(p_.dquery_semaphore + tile);
    }

    __device__ __forceinline__ void store_keys(const DkvSum& sum, typename Traits::KeysTile& staging,
                                               const RowsView& view, float scale) const {
        store_rounded<T, kDkvColStep>(sum, Keys(address_of(staging), Keys::lane_offset(dkv_key(), dkv_col())), scale);
        __syncthreads();
        copy_tile_out<Traits::kThreads>(staging, first_key_of(view), view.row_stride, block_.keys(),
                                        static_cast<int>(p_.head_dim));
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const BwdBlock<Traits, kBias> block_;
    const SmemAddress address_of;
    uint32_t lane_offsets_;  // of this thread, in shared memory
    float key_bias_ = 0;     // of key threadIdx.x
};

template <typename Traits, BiasKind kBias, bool kCausal>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.blocks_per_sm)
    bwd_kernel(const __grid_constant__ BwdArgs p) {
    if constexpr (!Traits::kIsUsed) return;
    if (is_inactive(p)) return;
    using Kernel = Bwd<Traits, kBias, kCausal>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory);
    const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys);
    const int kv_heads = static_cast<int>(p.kv_heads), batches = static_cast<int>(p.batch);
    const int group = static_cast<int>(p.heads / p.kv_heads);  // found later, it would cost the main loop registers
    int n_block, kv_head, batch;
    if (p.deterministic) {
        // Whoever waits for the blocks of lower keys holds a higher ticket than they: they have begun.
        if (threadIdx.x == 0) smem.ticket = atomicAdd(p.dquery_semaphore + dquery_tiles_total(p, p), 1);
        __syncthreads();
        kv_head = smem.ticket % kv_heads;
        batch = smem.ticket / kv_heads % batches;
        n_block = smem.ticket / kv_heads / batches;
    } else if (Kernel::DbiasWriter::owns_cluster(p)) {
        // The blocks of a cluster differ in their batch element alone.
        const int sharers = static_cast<int>(p.dbias.batch_group_size), cluster = blockIdx.x / sharers;
        n_block = cluster % num_n_blocks;
        kv_head = cluster / num_n_blocks % kv_heads;
        batch = cluster / num_n_blocks / kv_heads * sharers + blockIdx.x % sharers;
    } else {
        n_block = blockIdx.x % num_n_blocks;
        kv_head = blockIdx.x / num_n_blocks % kv_heads;
        batch = blockIdx.x / num_n_blocks / kv_heads;
    }
    if (threadIdx.x == 0) {
        smem.sequence = Sequence(p, batch);
        smem.bias_batch = p.cu_seqlens_q != nullptr ? batch : shared_batch(p.bias, smem.sequence);
        smem.rank = batch % static_cast<int>(p.dbias.batch_group_size);
    }
    __syncthreads();
    if (n_block * Traits::kKeys >= smem.sequence.keys) return;
    Kernel(p, smem, group, n_block, kv_head).run();
}

}  // namespace flash_dmattn::cuda::sm80
