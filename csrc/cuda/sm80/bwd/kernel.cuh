// The backward's main kernel: one CTA owns an n_block of one KV head and visits the m_blocks of its query heads.
//
// dK and dV stay in registers. dQ is summed in float32 in global memory, in register order (dquery_accum in plan.h), so
// that an addition covers 16 bytes per thread and 512 per warp.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "shared_storage.cuh"
#include "cuda/sm80/dbias/writers.cuh"
#include "cuda/common/dquery_tiles.cuh"

namespace flash_dmattn::cuda::sm80 {

// deterministic: one semaphore per m_block orders the additions to dQ by n_block.
__device__ __forceinline__ void dq_semaphore_wait(const int32_t* semaphore, int n_block) {
    if (threadIdx.x == 0) {
        while (load_acquire(semaphore) != n_block) {}
    }
    __syncthreads();
}
__device__ __forceinline__ void dq_semaphore_release(int32_t* semaphore) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Arrays are locals of run(), not members: see BwdCta. `visible_keys` is a local of run() too, since the compiler keeps
// it in local memory: in a function that run() calls it would share that memory with the mainloop's arrays and keep
// them there.
// kAdjustsScores: the call has a softcap, a relative bias or both.
template <typename Traits, BiasKind kBias, bool kAdjustsScores>
class BwdKernel {
public:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;
    using DbiasWriter = typename DbiasWriterOf<Traits, kBias>::Type;

    // smem.sequence has been written; this n_block has keys of it.
    __device__ BwdKernel(const BwdArgs& p, SharedStorage& smem, int qheads_per_kv, int n_block, int kv_head)
        : p_(p), smem_(smem), cta_(p, smem, qheads_per_kv, n_block, kv_head), address_of(cta_.address_of) {
        const int dq_row = warp_id() / Traits::kDqColWarps * Traits::kDqRows,
                  dq_col = warp_id() % Traits::kDqColWarps * 16;
        const auto store_offset = [&](LdmatrixOffset which, uint32_t offset) {
            smem.ldmatrix_offsets[which][threadIdx.x] = offset;
        };
        store_offset(kScoreA, ScoreA::lane_offset(cta_.score_row, 0));
        store_offset(kScoreB, ScoreB::lane_offset(cta_.score_key, 0));
        store_offset(kScoreC, ScoreC::lane_offset(cta_.score_row, cta_.score_key));
        store_offset(kDkvA, DkvA::lane_offset(0, dkv_key()));
        store_offset(kDkvB, DkvB::lane_offset(0, dkv_col()));
        store_offset(kDqA, DqA::lane_offset(dq_row, 0));
        store_offset(kDqB, DqB::lane_offset(0, dq_col));
        ldmatrix_offsets_ = opaque(address_of(smem.ldmatrix_offsets) + threadIdx.x * 2);
    }

    __device__ __forceinline__ void run() {
        // Prologue: K, V and the first m_block's stage.
        DkvAccumulator dkey, dvalue;
        clear(dkey);
        clear(dvalue);
        typename DbiasWriter::Sums dbias_sums;
        DbiasWriter dbias(cta_, dbias_sums);
        dbias.begin();
        auto m_blocks = cta_.m_block_iterator();
        bool more = m_blocks.next();
        if (more) {
            update_head_pointers(m_blocks.head());
            load_stage(0, m_blocks.m_block());
        }
        uint32_t visible_keys[Traits::kWords];
        find_visible_keys(visible_keys);
        load_keys(smem_.key, p_.key, visible_keys);
        load_keys(smem_.value, p_.value, visible_keys);
        cp_async_commit();

        // Mainloop over m_blocks.
        for (int stage = 0; more; stage ^= 1) {
            const MBlockStep step{stage, m_blocks.head(), m_blocks.m_block(), m_blocks.mask_full()};
            wait_for_qdo(smem_.qdo[stage], cta_.rows_left(step.m_block));
            dbias.begin_m_block();
            more = m_blocks.next();
            const bool ends_head = !more || m_blocks.head() != step.head;
            if (more) {
                if (ends_head) update_head_pointers(m_blocks.head());
                load_stage(stage ^ 1, m_blocks.m_block());
            }

#pragma unroll 1
            for (auto gradient = first_gradient<kAdjustsScores>(p_, needs_dx());; gradient = ScoreGradient::kDs) {
#pragma unroll
                for (int pass = 0; pass < kPasses; ++pass) compute_scores(step, pass * kPassN, gradient, dbias);
                __syncthreads();
                if (is_dx<kAdjustsScores>(p_, gradient)) add_tile_of_dx(step, dbias);
                if (gradient == ScoreGradient::kDs) break;
                __syncthreads();
            }
            gemm_dkv(dvalue, probs_of(step), smem_.qdo[stage].dout);
            accumulate_dq(step);
            gemm_dkv(dkey, smem_.dscores, smem_.qdo[stage].query);
            dbias.end_m_block(step);
            if (ends_head) dbias.end_head(step.head, more, m_blocks);
        }
        dbias.end();

        // Epilogue: dK and dV.
        cp_async_wait<0>();
        __syncthreads();
        store_dkv(dkey, smem_.key, p_.dkey, static_cast<float>(p_.softmax_scale));
        store_dkv(dvalue, smem_.value, p_.dvalue, 1.f);
    }

private:
    static constexpr bool kKeyBias = SharedStorage::kKeyBias;
    static constexpr int kPasses = Traits::template kPassesWith<kBias>, kPassN = Traits::kScoreN / kPasses;
    static constexpr int kDkvColStep = Traits::kDkvColWarps * 16, kDqColStep = Traits::kDqColWarps * 16;
    using DkvAccumulator = float[Traits::kDkvM][Traits::kDkvN][4];
    using ScoreA = FragmentsA<typename Traits::RowsTile, Major::kK>;
    using ScoreB = FragmentsB<typename Traits::KvTile, Major::kK>;
    using ScoreC = SmemFragments<typename Traits::ScoresTile, MatrixOrder::kColMajor>;
    using DkvA = FragmentsA<typename Traits::ScoresTile, Major::kMN>;
    using DkvB = FragmentsB<typename Traits::RowsTile, Major::kMN>;
    using DqA = FragmentsA<typename Traits::ScoresTile, Major::kK>;
    using DqB = FragmentsB<typename Traits::KvTile, Major::kMN>;
    using DkvC = SmemFragments<typename Traits::KvTile, MatrixOrder::kColMajor>;

    __device__ const Sequence& sequence() const { return cta_.sequence(); }
    static __device__ int dkv_key() { return warp_id() / Traits::kDkvColWarps * Traits::kDkvKeys; }
    static __device__ int dkv_col() { return warp_id() % Traits::kDkvColWarps * 16; }
    __device__ __forceinline__ uint32_t lane_offset(LdmatrixOffset which) const {
        return load_shared_u16(ldmatrix_offsets_ + which * Traits::kThreads * 2);
    }
    __device__ typename Traits::ScoresTile& probs_of(const MBlockStep& step) const {
        return smem_.probs[SharedStorage::kProbStages == 2 ? step.stage : 0];
    }

    // K and V of keys that no row sees may hold NaN and are not read. A lane reads the block summary of one m_block.
    __device__ __forceinline__ void find_visible_keys(uint32_t (&visible_keys)[Traits::kWords]) const {
        const Sequence& s = sequence();
        const int first_head = cta_.first_head, end_head = first_head + cta_.qheads_per_kv;
        const bool is_masked = has_mask(p_);
#pragma unroll
        for (int w = 0; w < Traits::kWords; ++w) visible_keys[w] = 0;
        const int num_m_blocks = is_masked ? ceil_div(s.rows, Traits::kRows) : 0;
        for (int head = first_head; head < end_head; ++head) {
            uint32_t visible_by_head[Traits::kWords];
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) visible_by_head[w] = is_masked ? 0 : ~0u;
            const MaskSummaries<Traits::kRows, Traits::kKeys> masks(p_, s, head);
            for (int m_block = lane_id(); m_block < num_m_blocks; m_block += 32) {
                const int first_row = m_block * Traits::kRows;
                const auto summary = masks.of(first_row, min(first_row + Traits::kRows, s.rows) - 1, cta_.n_block);
#pragma unroll
                for (int w = 0; w < Traits::kWords; ++w) visible_by_head[w] |= summary.visible_keys[w];
            }
#pragma unroll
            for (int w = 0; w < Traits::kWords; ++w) {
                uint32_t visible_by_bias = ~0u;
                if constexpr (kKeyBias)
                    visible_by_bias = __ballot_sync(
                        ~0u, key_bias_log2<T>(p_, s, head, cta_.first_key + w * 32 + lane_id()) != -kInfinity);
                visible_keys[w] |= __reduce_or_sync(~0u, visible_by_head[w]) & visible_by_bias;
            }
        }
    }
    __device__ __forceinline__ T* first_key_of(const RowsView& view) const {
        return key_rows<T>(view, sequence(), cta_.kv_head) + cta_.first_key * view.row_stride;
    }
    __device__ __forceinline__ void load_keys(typename Traits::KvTile& tile, const RowsView& view,
                                              const uint32_t (&visible_keys)[Traits::kWords]) const {
        const T* from = first_key_of(view);
        copy_rows_async<Traits::kThreads>(tile, static_cast<int>(p_.head_dim), [&](int key) -> const T* {
            uint32_t word = visible_keys[0];
#pragma unroll
            for (int w = 1; w < Traits::kWords; ++w) word = key / 32 == w ? visible_keys[w] : word;
            return cta_.first_key + key < sequence().keys && word >> (key % 32) & 1 ? from + key * view.row_stride
                                                                                    : nullptr;
        });
    }

    __device__ __forceinline__ void update_head_pointers(int head) {
        __syncwarp();
        if (lane_id() == 0) smem_.head_pointers[warp_id()] = HeadPointers<T>(p_, sequence(), head);
        if (kBias == BiasKind::kDense && lane_id() == 1)
            smem_.bias_pointers[warp_id()] = BiasPointer<T>(p_, sequence(), head);
        __syncwarp();
        if (kKeyBias && threadIdx.x < Traits::kKeys)
            key_bias_ = key_bias_log2<T>(p_, sequence(), head, cta_.first_key + threadIdx.x);
    }
    __device__ __forceinline__ void load_stage(int stage, int m_block) const {
        load_qdo_stage(smem_.qdo[stage], address_of, p_, sequence(), smem_.head_pointers[warp_id()],
                       m_block * Traits::kRows, cta_.rows_left(m_block), cta_.n_block);
        if constexpr (kBias == BiasKind::kDense)
            load_bias<Traits>(smem_.probs[stage], address_of, p_, sequence(), smem_.bias_pointers[warp_id()], m_block,
                              cta_.n_block);
        if (kKeyBias && threadIdx.x < Traits::kKeys) smem_.qdo[stage].key_bias[threadIdx.x] = key_bias_;
        cp_async_commit();
    }

    __device__ bool needs_drelative_bias() const { return kAdjustsScores && p_.drelative_bias != nullptr; }
    __device__ bool needs_dx() const { return needs_drelative_bias() || DbiasWriter::needs_dx(p_); }

    // Recomputes P and a gradient of the scores of one pass, the columns of this warp from fragment first_n on. Stores
    // them rounded, P only with dS.
    __device__ __forceinline__ void compute_scores(const MBlockStep& step, int first_n, ScoreGradient gradient,
                                                   DbiasWriter& dbias) const {
        const auto& qdo = smem_.qdo[step.stage];
        const int score_row = cta_.score_row, score_key = cta_.score_key + first_n * 8;
        float scores[Traits::kScoreM][kPassN][4], dprobs[Traits::kScoreM][kPassN][4];
        const uint32_t a_offset = lane_offset(kScoreA);
        const uint32_t b_offset = lane_offset(kScoreB) + first_n * 8 * ScoreB::kRowBytes;
        const uint32_t c_offset = lane_offset(kScoreC);
        // Holds the bias until P overwrites it.
        const ScoreC prob_fragments = ScoreC(address_of(probs_of(step)), c_offset).from(0, first_n * 8);
        const auto dense_bias = [&](uint32_t (&to)[4], int m, int n) {
            prob_fragments.template load<false>(to, m * 16, n * 8);
        };
        const auto adjust_scores = [&](auto& s, auto& dp) {
            const int row = step.m_block * Traits::kRows + score_row, key = cta_.first_key + score_key;
            apply_softcap_and_relative_bias(
                s, dp, p_, sequence(), relative_bias_entries<true>(p_, sequence().batch, step.head), gradient,
                [&](int i) { return row + i * 8 + fragment_row(); },
                [&](int n, int e) { return key + n * 8 + fragment_col() + e; });
        };
        const auto make_visibility = [&] {
            return BlockVisibility<Traits::kRows, Traits::kKeys>(p_, sequence(), qdo, step.m_block, cta_.n_block,
                                                                 step.mask_full);
        };
        recompute_p_ds<Traits, kBias, kAdjustsScores>(
            scores, dprobs, p_, ScoreA(address_of(qdo.query), a_offset), ScoreB(address_of(smem_.key), b_offset),
            ScoreA(address_of(qdo.dout), a_offset), ScoreB(address_of(smem_.value), b_offset), qdo, dense_bias,
            adjust_scores, make_visibility, score_row, score_key, cta_.rows_left(step.m_block));
        if (gradient == ScoreGradient::kDs) store_accumulator<T>(scores, prob_fragments);
        store_accumulator<T>(dprobs, ScoreC(address_of(smem_.dscores), c_offset).from(0, first_n * 8));
        if (!is_dx<kAdjustsScores>(p_, gradient)) return;
        dbias.add_dx(step, dprobs, first_n);
        if (needs_drelative_bias() && !is_grid()) add_relative_bias_gradient(step, dprobs, score_key);
    }

    // dV += P^T dO, or dK += dS^T Q.
    __device__ __forceinline__ void gemm_dkv(DkvAccumulator& acc, const typename Traits::ScoresTile& scores,
                                             const typename Traits::RowsTile& rows) const {
        warp_gemm<T, Traits::kRows, kDkvColStep>(acc, DkvA(address_of(scores), lane_offset(kDkvA)),
                                                 DkvB(address_of(rows), lane_offset(kDkvB)));
    }
    // dQ += dS K, in dquery_accum.
    __device__ __forceinline__ void accumulate_dq(const MBlockStep& step) const {
        float dquery[Traits::kDqM][Traits::kDqN][4];
        clear(dquery);
        warp_gemm<T, Traits::kKeys, kDqColStep>(dquery, DqA(address_of(smem_.dscores), lane_offset(kDqA)),
                                                DqB(address_of(smem_.key), lane_offset(kDqB)));
        const int64_t dq_tile = dquery_tile<Traits::kRows>(p_, sequence(), step.head, step.m_block);
        float* to = p_.dquery_accum + dq_tile * Traits::kRows * Traits::kHeadDim + threadIdx.x * 4;
        if (p_.deterministic) dq_semaphore_wait(p_.dquery_semaphores + dq_tile, cta_.n_block);
#pragma unroll
        for (int m = 0; m < Traits::kDqM; ++m)
#pragma unroll
            for (int n = 0; n < Traits::kDqN; ++n)
                reduce_add(to + (m * Traits::kDqN + n) * Traits::kThreads * 4, dquery[m][n]);
        if (p_.deterministic) dq_semaphore_release(p_.dquery_semaphores + dq_tile);
    }

    __device__ bool is_grid() const {
        return p_.relative_bias.grid_width > 0 && p_.relative_bias.batch_group_size == 0;
    }
    // Adds the gradient of relative_bias of one pass, except that of a grid. Overwrites dx. first_key: of the tile.
    __device__ __forceinline__ void add_relative_bias_gradient(const MBlockStep& step,
                                                               float (&dx)[Traits::kScoreM][kPassN][4],
                                                               int first_key) const {
        const RelativeBiasGradientOf<true> gradient(p_, sequence(), step.head);
        const int first_row = step.m_block * Traits::kRows + cta_.score_row;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
            gradient.add_fragments(dx[m], first_row + m * 16, cta_.first_key + first_key);
    }
    // Adds to the gradients of the biases what is summed from dx in shared memory.
    __device__ __forceinline__ void add_tile_of_dx(const MBlockStep& step, DbiasWriter& dbias) const {
        dbias.add_tile(step);
        if (!needs_drelative_bias() || !is_grid()) return;
        const RelativeBiasGradientOf<true> gradient(p_, sequence(), step.head);
        gradient.template add_grid_tile<Traits::kThreads>(smem_.dscores, step.m_block * Traits::kRows, cta_.first_key);
    }

    __device__ __forceinline__ void store_dkv(const DkvAccumulator& acc, typename Traits::KvTile& staging,
                                              const RowsView& view, float scale) const {
        store_accumulator<T, kDkvColStep>(acc, DkvC(address_of(staging), DkvC::lane_offset(dkv_key(), dkv_col())),
                                          scale);
        __syncthreads();
        copy_tile_out<Traits::kThreads>(staging, first_key_of(view), view.row_stride, cta_.keys_left(),
                                        static_cast<int>(p_.head_dim));
    }

    const BwdArgs& p_;
    SharedStorage& smem_;
    const BwdCta<Traits, kBias> cta_;
    const SmemAddress address_of;
    uint32_t ldmatrix_offsets_;  // shared-memory address of this thread's offsets
    float key_bias_ = 0;         // of key threadIdx.x of the n_block, times log2(e)
};

template <typename Traits, BiasKind kBias, bool kAdjustsScores>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kSizes.ctas_per_sm)
    bwd_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if constexpr (!Traits::kIsUsed) return;
    if (is_inactive(p)) return;
    using Kernel = BwdKernel<Traits, kBias, kAdjustsScores>;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(shared_memory);
    const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys);
    const int kv_heads = static_cast<int>(p.kv_heads), batches = static_cast<int>(p.batch);
    const int qheads_per_kv =
        static_cast<int>(p.heads / p.kv_heads);  // computed here: later it would cost the mainloop registers
    int n_block, kv_head, batch;
    if (p.deterministic) {
        // Work indices rise with n_block, so a CTA waits only for CTAs that have started.
        if (threadIdx.x == 0) smem.work_index = atomicAdd(p.tile_count_semaphore, 1);
        __syncthreads();
        kv_head = smem.work_index % kv_heads;
        batch = smem.work_index / kv_heads % batches;
        n_block = smem.work_index / kv_heads / batches;
    } else if (Kernel::DbiasWriter::uses_cluster(p)) {
        // The CTAs of a cluster differ in their batch element only.
        const int group_size = static_cast<int>(p.dbias.batch_group_size), cluster = blockIdx.x / group_size;
        n_block = cluster % num_n_blocks;
        kv_head = cluster / num_n_blocks % kv_heads;
        batch = cluster / num_n_blocks / kv_heads * group_size + blockIdx.x % group_size;
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
    Kernel(p, smem, qheads_per_kv, n_block, kv_head).run();
}

}  // namespace flash_dmattn::cuda::sm80
