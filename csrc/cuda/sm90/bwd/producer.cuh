// The producer warpgroup of the backward: K and V of the n_block, then Q, dO, row data and a dense bias of each
// m_block. One of its threads also stores the gradient of a dense bias (dense_dbias.cuh).
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "dense_dbias.cuh"
#include "scale.h"
#include "shared_storage.cuh"
#include "tile_scheduler.cuh"
#include "workspace.cuh"
#include "cuda/arch/tma_load_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class BwdProducer {
public:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;

    __device__ BwdProducer(const BwdArgs& p, const BwdTensorMaps& maps, const BwdScale& scale, SharedStorage& smem,
                           const BwdWorkTile& work_tile)
        : p_(p), maps_(maps), scale_(scale), smem_(smem), work_tile_(work_tile), query_pipeline_(smem.query_pipeline),
          dout_pipeline_(smem.dout_pipeline), bias_pipeline_(smem.bias_pipeline) {
        if constexpr (is_relative(kBias)) relative_entries_ = SharedStorage::RelativeSegment::size(p.relative_bias);
    }

    __device__ void run() {
        load_keys();
        if constexpr (kBias == BiasKind::kDense) clear_masked_dbias();
        for_each_m_block<false>([&](int head, int m_block, bool is_active, bool is_full) {
            if (is_active) load_m_block(head, m_block, is_full);
        });
        query_pipeline_.producer_acquire();
        if (threadIdx.x == 0) smem_.m_blocks[query_pipeline_.stage()].header.m_block = MBlockInfo::kEnd;
        if (threadIdx.x < kRowDataThreads) mbarrier_arrive(query_pipeline_.full());
        if (threadIdx.x == kQueryThread) mbarrier_arrive(query_pipeline_.full());  // as with each load of Q
        if constexpr (kBias == BiasKind::kDense)
            if (threadIdx.x == kBiasThread) DenseDbiasStore<Traits>(p_, maps_, smem_, work_tile_).finish();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWords = Traits::kWords;
    using MBlockInfo = typename SharedStorage::MBlockInfo;
    using Summaries = MaskSummaries<kRows, kKeys, Traits::kServesMasksAndSoftcap>;
    // Entries of a relative bias that a thread loads.
    static constexpr int kRelativeEntries =
        is_relative(kBias) ? ceil_div(SharedStorage::RelativeSegment::kMaxEntries, kWarpgroupThreads) : 1;
    static constexpr int kRowDataThreads = SharedStorage::kRowDataThreads;
    // Threads that issue TMA loads. kBiasThread also waits for dS and for other CTAs, which delays its warp: with 64
    // rows this warp has neither row data nor other loads, so that with a dense bias one thread loads both Q and dO.
    static constexpr int kQueryThread = 64, kDoutThread = kBias == BiasKind::kDense ? 64 : 96, kBiasThread = 96;

    __device__ const Sequence& sequence() const { return smem_.sequence; }
    __device__ int first_key() const { return work_tile_.n_block * kKeys; }

    // Calls visit(head, m_block, is_active, is_full). is_active: some row sees a key; is_full: the mask masks no score.
    // kAll: also for m_blocks outside active_rows. The m_blocks ascend; with deterministic=True they descend, so that
    // under causality all CTAs of a head begin with the same one.
    template <bool kAll, typename Visit>
    __device__ __forceinline__ void for_each_m_block(const Visit& visit) const {
        const int causal_begin = p_.is_causal ? sequence().causal_begin(first_key()) / kRows : 0;
        for (int head = work_tile_.first_head; head < work_tile_.first_head + work_tile_.qheads_per_kv; ++head) {
            const RowRange rows = kAll ? RowRange{0, sequence().rows} : active_rows(head);
            const int begin = rows.begin / kRows, count = max(ceil_div(rows.end, kRows) - begin, 0);
            const auto m_block_at = [&](int i) { return begin + (p_.deterministic ? count - 1 - i : i); };
            for (BlockMaskIterator blocks{0}; blocks.next < count;) {
                const int first = blocks.next, end = min(first + 32, count);
                blocks.test_next_32(count, [&](int i, bool& is_empty, bool& is_full) {
                    const int m_block = m_block_at(i);
                    is_full = block_summary(head, m_block, work_tile_.n_block).full;
                    is_empty = m_block < causal_begin || is_masked_out(head, m_block, work_tile_.n_block);
                });
                for (int i = first; i < end; ++i)
                    visit(head, m_block_at(i), blocks.pending >> (i - first) & 1, blocks.is_full(i - first));
            }
        }
    }

    // A range that contains every row that sees a key of the n_block.
    __device__ __forceinline__ RowRange active_rows(int head) const {
        RowRange range = Summaries(p_, sequence(), head).rows_of(sequence().rows, work_tile_.n_block);
        if (p_.is_causal) range.begin = max(range.begin, sequence().causal_begin(first_key()));
        if constexpr (kBias == BiasKind::kRelative) {
            const auto rows = rows_of_distances(head, work_tile_.n_block);
            if (rows.empty()) return {0, 0};
            range = {max(range.begin, rows.begin), min(range.end, rows.end)};
        }
        return range;
    }
    __device__ __forceinline__ BlockSummary<kKeys> block_summary(int head, int m_block, int n_block) const {
        const Summaries mask(p_, sequence(), head);
        return mask.of(m_block * kRows, min((m_block + 1) * kRows, sequence().rows) - 1, n_block);
    }
    // The rows that a relative bias leaves to an n_block.
    __device__ __forceinline__ VisibleDistances::Range rows_of_distances(int head, int n_block) const {
        return VisibleDistances(p_, p_.visible_distances, sequence(), head)
            .rows_of(n_block * kKeys, (n_block + 1) * kKeys - 1);
    }
    // Whether the mask or a relative bias masks all scores.
    __device__ __forceinline__ bool is_masked_out(int head, int m_block, int n_block) const {
        if constexpr (kBias == BiasKind::kRelative) {
            const auto rows = rows_of_distances(head, n_block);
            if (rows.empty() || rows.end <= m_block * kRows || rows.begin >= (m_block + 1) * kRows) return true;
        }
        return block_summary(head, m_block, n_block).empty;
    }
    // The value of the dQ semaphore at which this CTA may add: one after the last lower n_block that adds to the
    // m_block's dQ. A warp calls.
    __device__ __forceinline__ int dq_semaphore_value(int head, int m_block) const {
        for (int end = work_tile_.n_block; end > 0; end -= 32) {
            const int n_block = end - 1 - lane_id();
            const uint32_t active = __ballot_sync(~0u, n_block >= 0 && !is_masked_out(head, m_block, n_block));
            if (active != 0) return end - (__ffs(active) - 1);
        }
        return 0;
    }

    __device__ void load_keys() {
        const Sequence& s = sequence();
        if (threadIdx.x == 0) {
            const uint32_t barrier = smem_address(&smem_.keys_full);
            mbarrier_expect_tx(barrier, 2 * sizeof(typename Traits::KvTile));
            tma_load_rows(smem_.key, maps_.key, barrier, p_, s, s.first_key + first_key(), work_tile_.kv_head);
            tma_load_rows(smem_.value, maps_.value, barrier, p_, s, s.first_key + first_key(), work_tile_.kv_head);
        }
        // Finds the keys that some row sees, by the mask and a key bias: the consumers zero the others. A word for each
        // warp.
        const int warp = warp_id(), key = first_key() + threadIdx.x;
        uint32_t visible = 0;
        for (int head = work_tile_.first_head; head < work_tile_.first_head + work_tile_.qheads_per_kv; ++head) {
            uint32_t unmasked = ~0u;
            if (Traits::kServesMasksAndSoftcap && has_mask(p_)) {
                unmasked = 0;
                const Summaries mask(p_, sequence(), head);
                const RowRange rows = mask.rows_of(s.rows, work_tile_.n_block);
                for (int m_block = rows.begin / kRows + lane_id(); m_block * kRows < rows.end; m_block += 32) {
                    const auto summary =
                        mask.of(m_block * kRows, min((m_block + 1) * kRows, sequence().rows) - 1, work_tile_.n_block);
#pragma unroll
                    for (int w = 0; w < kWords; ++w) unmasked |= summary.visible_keys[w] & (w == warp ? ~0u : 0u);
                }
            }
            bool is_masked = key >= s.keys;
            if (kBias == BiasKind::kKey && !is_masked) {
                const char* bias = bias_data(p_.bias, score_offset(p_.bias, s, head, p_.heads));
                is_masked =
                    key_bias_of<T>(p_.bias, load_key_bias(p_.bias, bias, key * p_.bias.col_stride)) == -kInfinity;
            }
            visible |= __reduce_or_sync(~0u, unmasked) & __ballot_sync(~0u, !is_masked);
        }
        if (lane_id() == 0 && warp < kWords) smem_.visible_keys[warp] = visible;
        mbarrier_arrive(smem_address(&smem_.keys_full));
    }

    // Fetches row data before it waits for a free stage.
    __device__ __forceinline__ void load_m_block(int head, int m_block, bool is_full) {
        const Sequence& s = sequence();
        const int first = m_block * kRows, row = first + threadIdx.x;
        const bool is_masked = !is_full && masks_scores<Traits, kBias>(p_);
        RowStats stats{};
        MaskWords words = {};
        if (threadIdx.x < kRows) {
            if (is_masked) words = load_mask(head, row);
            stats = load_row_stats(p_, s, head, row);
        }
        float relative_bias[kRelativeEntries];
        int position = 0, clamped_end = 0;
        if constexpr (is_relative(kBias)) {
            const RelativeBias bias(p_.relative_bias, s, relative_bias_entries(p_, s.batch, head));
            if constexpr (kBias == BiasKind::kRelative) {
                position = bias.row_part(first) + bias.key_part(first_key());
                clamped_end = bias.clamped_end(position - (kRows - 1), position + kKeys - 1);
                const float shared = clamped_end != 0 ? bias[position] : 0.f;
                if (!(fabsf(shared) <= kMaxSharedBias)) {
                    clamped_end = 0;
                } else if (!stats.is_empty()) {
                    stats.lse -= shared * kLog2E;
                }
            }
            if (clamped_end == 0) load_relative_bias(relative_bias, bias, first);
        }
        issue_tma_loads(head, m_block);
        if (threadIdx.x < kRowDataThreads) {
            const int semaphore_value = p_.deterministic && warp_id() == 0 ? dq_semaphore_value(head, m_block) : 0;
            query_pipeline_.producer_acquire();
            auto& info = smem_.m_blocks[query_pipeline_.stage()];
            if (threadIdx.x < kRows) {
                info.lse[threadIdx.x] = stats.lse;
                info.delta[threadIdx.x] = stats.delta;
                if constexpr (Traits::kServesMasksAndSoftcap) {
                    if (is_masked) {
                        info.mask[0][threadIdx.x] = words.x, info.mask[1][threadIdx.x] = words.y;
                        if constexpr (kWords == 4)
                            info.mask[2][threadIdx.x] = words.z, info.mask[3][threadIdx.x] = words.w;
                    }
                }
            }
            if constexpr (is_relative(kBias)) {
                if (clamped_end == 0) {
                    auto& segment = info.relative_bias.entries;
                    segment.begin(p_.relative_bias, first, static_cast<int>(threadIdx.x));
#pragma unroll
                    for (int i = 0; i < kRelativeEntries; ++i)
                        if (const int at = threadIdx.x + i * kWarpgroupThreads; at < relative_entries_)
                            segment.store(at, relative_bias[i]);
                }
            }
            const bool has_empty_rows = __any_sync(~0u, stats.is_empty());
            if (lane_id() == 0 && warp_id() < ceil_div(kRows, 32))
                info.header.has_empty_rows_of[warp_id()] = has_empty_rows;
            if (threadIdx.x == 0) {
                info.header.head = head;
                info.header.m_block = m_block;
                const int64_t tile = dquery_tile<kRows>(p_, s, head, m_block);
                info.dq_accum = p_.dquery_accum + tile * DqueryLayout<Traits>::kSize;
                info.dq_semaphore = dquery_semaphores(p_, tile);
                info.dq_semaphore_value = semaphore_value;
                info.header.is_full_block = is_full;
                if constexpr (is_relative(kBias)) info.relative_bias.gradient = RelativeBiasGradient(p_, s, head);
                if constexpr (kBias == BiasKind::kRelative) {
                    info.header.clamped_end = static_cast<int8_t>(clamped_end);
                    info.relative_bias.position = position;
                }
            }
            mbarrier_arrive(query_pipeline_.full());
        }
        query_pipeline_.advance();
        dout_pipeline_.advance();
        bias_pipeline_.advance();
    }
    // The entries threadIdx.x + i * kWarpgroupThreads of the m_block's segment, in the order of rows.
    __device__ __forceinline__ void load_relative_bias(float (&entries)[kRelativeEntries], const RelativeBias& bias,
                                                       int first_row) const {
        const float scale = SharedStorage::kStartsFromBias ? 1 / scale_.scale : kLog2E;
        constexpr int kStep = -SharedStorage::RelativeSegment::kKeyStep;
        const int first =
            bias.row_part(first_row) + bias.key_part(first_key() + kKeys - 1) + kStep * static_cast<int>(threadIdx.x);
#pragma unroll
        for (int i = 0; i < kRelativeEntries; ++i)
            if (i * kWarpgroupThreads < relative_entries_)
                entries[i] = bias[first + kStep * i * kWarpgroupThreads] * scale;
    }
    __device__ __forceinline__ void issue_tma_loads(int head, int m_block) {
        const Sequence& s = sequence();
        const int tensor_row = s.first_row + m_block * kRows;
        if (threadIdx.x == kDoutThread) {
            dout_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(dout_pipeline_.full(), sizeof(typename Traits::RowsTile));
            tma_load_rows(smem_.dout[dout_pipeline_.stage()], maps_.dout, dout_pipeline_.full(), p_, s, tensor_row,
                          head);
        }
        if (threadIdx.x == kQueryThread) {
            query_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename Traits::RowsTile));
            tma_load_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, s, tensor_row,
                          head);
        }
        if constexpr (kBias == BiasKind::kDense)
            if (threadIdx.x == kBiasThread) load_dense_bias(head, m_block);
    }
    // One thread calls.
    __device__ __forceinline__ void load_dense_bias(int head, int m_block) {
        const int stage = bias_pipeline_.stage();
        DenseDbiasStore<Traits>(p_, maps_, smem_, work_tile_).begin(stage, head, m_block);
        bias_pipeline_.producer_acquire();
        mbarrier_arrive_and_expect_tx(bias_pipeline_.full(), sizeof(typename Traits::ScoresTile));
#pragma unroll
        for (int slab = 0; slab < Traits::ScoresTile::kSlabs; ++slab)
            tma_load_4d(smem_address(smem_.bias_dscores[stage].data + slab * kRows * 64), &maps_.bias,
                        bias_pipeline_.full(), first_key() + slab * 64, sequence().first_row + m_block * kRows,
                        shared_head(head, p_.heads, p_.bias.heads), smem_.bias_batch);
    }

    // A row's words of the packed mask.
    static_assert(kWords == 2 || kWords == 4);
    using MaskWords = std::conditional_t<kWords == 4, uint4, uint2>;
    __device__ __forceinline__ MaskWords load_mask(int head, int row) const {
        const uint32_t* words = mask_words(p_, sequence(), head) + work_tile_.n_block * kWords;
        const int64_t offset = min(row, sequence().rows - 1) * p_.packed_mask.bits_row_stride;
        return __ldg(reinterpret_cast<const MaskWords*>(words + offset));
    }

    // The mainloop skips m_blocks that see no key of the n_block. Their dbias is 0 before another batch element adds to
    // it.
    __device__ void clear_masked_dbias() const {
        if (!stores_dense_dbias(p_) || work_tile_.batch_rank > 0 || !(p_.is_causal || has_mask(p_))) return;
        for_each_m_block<true>([&](int head, int m_block, bool is_active, bool) {
            if (!is_active) clear_dbias(head, m_block);
        });
        named_barrier_sync(BwdNamedBarriers::kProducer, kWarpgroupThreads);
    }
    __device__ void clear_dbias(int head, int m_block) const {
        const Sequence& s = sequence();
        T* to = static_cast<T*>(p_.dbias.data) + score_offset(p_.dbias, s, head, p_.heads) +
                static_cast<int64_t>(m_block * kRows) * p_.dbias.row_stride + first_key();
        for (int i = threadIdx.x; i < kRows * kKeys / 8; i += kWarpgroupThreads) {
            const int row = i / (kKeys / 8), key = i % (kKeys / 8) * 8;
            // TMA requires seqlen_k to be a multiple of 8.
            if (m_block * kRows + row < s.rows && first_key() + key < s.keys)
                *reinterpret_cast<uint4*>(to + row * p_.dbias.row_stride + key) = {};
        }
    }

    const BwdArgs& p_;
    const BwdTensorMaps& maps_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const BwdWorkTile& work_tile_;
    Pipeline<Traits::kStages> query_pipeline_, dout_pipeline_, bias_pipeline_;
    int relative_entries_;  // of an m_block's segment; size() divides
};

}  // namespace flash_dmattn::cuda::sm90
