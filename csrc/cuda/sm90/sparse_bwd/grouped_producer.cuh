// The producer warpgroup of the grouped sparse backward: gathered n_blocks of K and V, and with each the rows of every
// head.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "grouped_shared_storage.cuh"
#include "cuda/arch/gather_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class GroupedSparseBwdProducer {
public:
    using T = typename Traits::T;
    using SharedStorage = GroupedSparseBwdSharedStorage<Traits>;

    __device__ GroupedSparseBwdProducer(const BwdArgs& p, const SparseBwdTensorMaps& maps, SharedStorage& smem)
        : p_(p), maps_(maps), smem_(smem), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline),
          query_pipeline_(smem.query_pipeline), dout_pipeline_(smem.dout_pipeline) {}

    __device__ void run() {
        const GroupedSparseBwdWorkTile& work_tile = smem_.work_tile();
        const KeyList& list = smem_.list();
        const int first = smem_.first_n_block, end = smem_.end_n_block, num_steps = work_tile.num_steps<kRows>();
        if (first == end) return;
        const QueryHead head(p_, work_tile.head);
        const T* keys = key_rows<const T>(p_.key, work_tile.s, head.kv_head);
        const T* values = key_rows<const T>(p_.value, work_tile.s, head.kv_head);
        const ListReader<T, kBias> reader(p_, work_tile.s, head, work_tile.first_row, list);
        const int head_dim = static_cast<int>(p_.head_dim), warp_key = warp_id() * kWarpKeys;
        const int lane_key = warp_key + lane_id() % kWarpKeys;  // two lanes share one where a warp has 16
        ListPrefetcher<T, kBias, kKeys> prefetcher(reader, list, lane_key, first, end);
        for (int n_block = first; n_block < end; ++n_block) {
            load_rows(work_tile, 0);
            uint32_t visible_rows[KeyList::kWords];
            float bias;
            const int position = prefetcher.resolve(visible_rows, bias);
            value_pipeline_.producer_acquire();
            gather_rows<kWarpKeys>(smem_.value, warp_key, values, p_.value.row_stride, position, head_dim);
            cp_async_mbarrier_arrive_noinc(value_pipeline_.full());
            value_pipeline_.advance();
            key_pipeline_.producer_acquire();
            if (threadIdx.x % 32 < kWarpKeys) smem_.keys.store(lane_key, position, visible_rows, bias);
            mbarrier_arrive(key_pipeline_.full());
            gather_rows<kWarpKeys>(smem_.key, warp_key, keys, p_.key.row_stride, position, head_dim);
            cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
            key_pipeline_.advance();
            prefetcher.advance();
            for (int step = 1; step < num_steps; ++step) load_rows(work_tile, step);
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kWarpKeys = kKeys / 4;
    static_assert(kRows <= 128 && kWarpKeys <= 32, "a thread has one row and one key");
    static constexpr int kQueryThread = 64, kDoutThread = 96;  // in two warps: neither waits for the other's pipeline

    // Fetches row data before it waits for a free stage.
    __device__ __forceinline__ void load_rows(const GroupedSparseBwdWorkTile& work_tile, int step) {
        const int head = work_tile.head_of<kRows>(step), first = work_tile.first_row + work_tile.row_of<kRows>(step);
        const int row = first + threadIdx.x;
        RowStats stats{};
        if (threadIdx.x < kRows) stats = load_row_stats(p_, work_tile.s, head, row);
        const int tensor_row = work_tile.s.first_row + first;
        query_pipeline_.producer_acquire();
        if (threadIdx.x == kQueryThread) {
            mbarrier_expect_tx(query_pipeline_.full(), sizeof(typename Traits::RowsTile));
            tma_load_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_, work_tile.s,
                          tensor_row, head);
        }
        if (threadIdx.x == kDoutThread) {
            dout_pipeline_.producer_acquire();
            mbarrier_arrive_and_expect_tx(dout_pipeline_.full(), sizeof(typename Traits::RowsTile));
            tma_load_rows(smem_.dout[dout_pipeline_.stage()], maps_.dout, dout_pipeline_.full(), p_, work_tile.s,
                          tensor_row, head);
        }
        auto& info = smem_.rows[query_pipeline_.stage()];
        if (threadIdx.x < kRows) {
            info.lse[threadIdx.x] = stats.lse;
            info.delta[threadIdx.x] = stats.delta;
        }
        const bool has_empty_rows = __any_sync(~0u, stats.is_empty());
        if (lane_id() == 0 && warp_id() < kRows / 32) info.has_empty_rows[warp_id()] = has_empty_rows;
        mbarrier_arrive(query_pipeline_.full());
        query_pipeline_.advance();
        dout_pipeline_.advance();
    }

    const BwdArgs& p_;
    const SparseBwdTensorMaps& maps_;
    SharedStorage& smem_;
    Pipeline<1> key_pipeline_, value_pipeline_;
    Pipeline<Traits::kStages> query_pipeline_, dout_pipeline_;
};

}  // namespace flash_dmattn::cuda::sm90
