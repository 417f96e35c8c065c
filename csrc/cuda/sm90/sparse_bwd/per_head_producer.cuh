// The producer warpgroup of the per-head sparse backward: the rows of the CTA once, then gathered n_blocks of K and V.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "per_head_shared_storage.cuh"
#include "cuda/arch/gather_rows.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
class PerHeadSparseBwdProducer {
public:
    using T = typename Traits::T;
    using SharedStorage = PerHeadSparseBwdSharedStorage<Traits>;

    __device__ PerHeadSparseBwdProducer(const BwdArgs& p, const SparseBwdTensorMaps& maps, SharedStorage& smem)
        : p_(p), maps_(maps), smem_(smem), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline) {}

    __device__ void run() {
        load_rows();
        const PerHeadSparseBwdWorkTile& work_tile = smem_.work_tile();
        const KeyList list = smem_.list();
        const int num_n_blocks = smem_.num_n_blocks;
        const QueryHead head(p_, work_tile.head);
        const T* keys = key_rows<const T>(p_.key, work_tile.s, head.kv_head);
        const T* values = key_rows<const T>(p_.value, work_tile.s, head.kv_head);
        const ListReader<T, kBias> reader(p_, work_tile.s, head, work_tile.first_row, list);
        const int head_dim = static_cast<int>(p_.head_dim), warp_key = warp_id() * 32;
        ListPrefetcher<T, kBias, kKeys> prefetcher(reader, list, static_cast<int>(threadIdx.x), 0, num_n_blocks);
        for (int n_block = 0; n_block < num_n_blocks; ++n_block) {
            const int position = produce_key_data(prefetcher);
            prefetcher.advance();
            gather_rows<32>(smem_.key[key_pipeline_.stage()], warp_key, keys, p_.key.row_stride, position, head_dim);
            mbarrier_arrive(key_pipeline_.full());
            cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
            key_pipeline_.advance();
            value_pipeline_.producer_acquire();
            gather_rows<32>(smem_.value[value_pipeline_.stage()], warp_key, values, p_.value.row_stride, position,
                            head_dim);
            cp_async_mbarrier_arrive_noinc(value_pipeline_.full());
            value_pipeline_.advance();
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;
    static_assert(kRows == 128 && kKeys == 128, "a thread has one row and one key");

    __device__ __forceinline__ void load_rows() {
        const PerHeadSparseBwdWorkTile& work_tile = smem_.work_tile();
        const uint32_t barrier = smem_address(&smem_.rows_full);
        const int row = work_tile.first_row + threadIdx.x;
        const RowStats stats = load_row_stats(p_, work_tile.s, work_tile.head, row);
        smem_.lse[threadIdx.x] = stats.lse;
        smem_.delta[threadIdx.x] = stats.delta;
        const bool has_empty_rows = __any_sync(~0u, stats.is_empty());
        if (lane_id() == 0) smem_.has_empty_rows[warp_id()] = has_empty_rows;
        if (threadIdx.x == 0) {
            mbarrier_arrive_and_expect_tx(barrier, 2 * sizeof(typename Traits::RowsTile));
            const int tensor_row = work_tile.s.first_row + work_tile.first_row;
            tma_load_rows(smem_.query, maps_.query, barrier, p_, work_tile.s, tensor_row, work_tile.head);
            tma_load_rows(smem_.dout, maps_.dout, barrier, p_, work_tile.s, tensor_row, work_tile.head);
        } else {
            mbarrier_arrive(barrier);
        }
    }

    // Writes the key's data to its stage. Returns the key's position, or -1 where no row sees it.
    __device__ __forceinline__ int produce_key_data(const ListPrefetcher<T, kBias, kKeys>& prefetcher) {
        uint32_t visible_rows[SharedStorage::kRowWords];
        float bias;
        const int position = prefetcher.resolve(visible_rows, bias);
        key_pipeline_.producer_acquire();
        smem_.keys[key_pipeline_.stage()].store(threadIdx.x, position, visible_rows, bias);
        return position;
    }

    const BwdArgs& p_;
    const SparseBwdTensorMaps& maps_;
    SharedStorage& smem_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
};

}  // namespace flash_dmattn::cuda::sm90
