// The producer warpgroup of the recompute kernel of dbias. Its first warp issues TMA loads, its second writes
// ContributorInfo.
#pragma once

#include "cuda/arch/tma_load_rows.cuh"
#include "cuda/softmax/scores.cuh"
#include "contributors.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
class DbiasProducer {
public:
    using SharedStorage = DbiasSharedStorage<Traits>;
    using WorkTile = DbiasWorkTile<Traits>;

    __device__ DbiasProducer(const BwdArgs& p, const DbiasTensorMaps& maps, SharedStorage& smem,
                             const WorkTile& work_tile)
        : p_(p), maps_(maps), smem_(smem), work_tile_(work_tile), operands_pipeline_(smem.operands_pipeline),
          contributor_pipeline_(smem.contributor_pipeline) {}

    __device__ void run() {
        const int warp = warp_id();
        if (warp == 0) load();
        if (warp == 1) produce_contributors();
    }

private:
    __device__ void load() {
        const bool is_elected = elect_one_sync();
        if (is_elected && work_tile_.has_contributors()) load_bias();
        for (DbiasContributors<Traits> contributors(p_, work_tile_); contributors.next();) {
            if (!is_elected) continue;
            const Sequence s = contributors.sequence();
            const int head = contributors.head(), kv_head = shared_head(head, p_.heads, p_.kv_heads);
            load_operands(maps_.query, maps_.key, s, head, kv_head);
            load_operands(maps_.dout, maps_.value, s, head, kv_head);
        }
    }
    __device__ void load_bias() {
        using BiasTile = typename Traits::BiasTile;
        const Sequence& s = work_tile_.sequence;
        const uint32_t full = smem_address(&smem_.bias_full);
        mbarrier_arrive_and_expect_tx(full, sizeof(BiasTile));
#pragma unroll
        for (int slab = 0; slab < BiasTile::kSlabs; ++slab)
            tma_load_4d(smem_address(smem_.bias.data + slab * BiasTile::kRows * BiasTile::kSlabCols), &maps_.bias, full,
                        work_tile_.first_key() + slab * BiasTile::kSlabCols, s.first_row + work_tile_.first_row(),
                        work_tile_.head, shared_batch(p_.bias, s));
    }
    // Q and K, or dO and V.
    __device__ void load_operands(const CUtensorMap& rows_map, const CUtensorMap& keys_map, const Sequence& s, int head,
                                  int kv_head) {
        operands_pipeline_.producer_acquire();
        const uint32_t full = operands_pipeline_.full();
        auto& operands = smem_.operands[operands_pipeline_.stage()];
        mbarrier_arrive_and_expect_tx(full, sizeof(operands));
        tma_load_rows(operands.rows, rows_map, full, p_, s, s.first_row + work_tile_.first_row(), head);
        tma_load_rows(operands.keys, keys_map, full, p_, s, s.first_key + work_tile_.first_key(), kv_head);
        operands_pipeline_.advance();
    }

    __device__ void produce_contributors() {
        using ContributorInfo = typename SharedStorage::ContributorInfo;
        constexpr int kRowsPerLane = Traits::kRows / 32;
        for (DbiasContributors<Traits> contributors(p_, work_tile_); contributors.next();
             contributor_pipeline_.advance()) {
            const Sequence s = contributors.sequence();
            const int head = contributors.head();
            RowStats stats[kRowsPerLane];
            bool has_empty_rows = false;
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                stats[i] = load_row_stats(p_, s, head, work_tile_.first_row() + i * 32 + lane_id());
                has_empty_rows |= stats[i].is_empty();
            }
            has_empty_rows = __any_sync(~0u, has_empty_rows);
            contributor_pipeline_.producer_acquire();
            ContributorInfo& info = smem_.contributors[contributor_pipeline_.stage()];
#pragma unroll
            for (int i = 0; i < kRowsPerLane; ++i) {
                info.lse[i * 32 + lane_id()] = stats[i].lse;
                info.delta[i * 32 + lane_id()] = stats[i].delta;
            }
            if (lane_id() == 0) {
                info.batch = s.batch;
                info.head = head;
                info.is_full = contributors.is_full() && !has_empty_rows;
                info.mask_words = p_.packed_mask.present() ? tile_mask_words(s, head) : nullptr;
            }
            mbarrier_arrive(contributor_pipeline_.full());
        }
        contributor_pipeline_.producer_acquire();
        if (lane_id() == 0) smem_.contributors[contributor_pipeline_.stage()].head = ContributorInfo::kEnd;
        mbarrier_arrive(contributor_pipeline_.full());
    }
    __device__ const uint32_t* tile_mask_words(const Sequence& s, int head) const {
        return mask_words(p_, s, head) + work_tile_.first_row() * p_.packed_mask.bits_row_stride +
               work_tile_.first_key() / 32;
    }

    const BwdArgs& p_;
    const DbiasTensorMaps& maps_;
    SharedStorage& smem_;
    const WorkTile& work_tile_;
    Pipeline<Traits::kStages> operands_pipeline_;
    Pipeline<SharedStorage::kContributorStages> contributor_pipeline_;
};

}  // namespace flash_dmattn::cuda::sm90
