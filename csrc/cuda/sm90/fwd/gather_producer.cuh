// The producer warpgroup of the sm90 forward over key lists: its threads gather K and V rows by cp.async.
//
// Each warp gathers a quarter of an n_block of listed keys (ListPrefetcher).
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/gather_rows.cuh"
#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/tma_load_rows.cuh"
#include "cuda/mask/gathered_key.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
class FwdGatherProducer {
public:
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;

    __device__ FwdGatherProducer(const FwdArgs& p, const FwdKernelParams& params, const FwdTensorMaps& maps,
                                 SharedStorage& smem)
        : p_(p), params_(params), scheduler_(params.scheduler), maps_(maps), smem_(smem),
          query_pipeline_(smem.query_pipeline), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.value_pipeline) {
    }

    __device__ void run() {
        // Packed sequences of different lengths have many empty work tiles: each lane tests one.
        for (unsigned round = 0; work_tile_of_round(round) < scheduler_.num_work_tiles; round += 32) {
            const unsigned index = work_tile_of_round(round + lane_id());
            const bool has_rows = index < scheduler_.num_work_tiles && !work_tile_of(index).is_empty();
            for (uint32_t left = __ballot_sync(~0u, has_rows); left != 0; left &= left - 1) {
                FwdWorkTile work_tile = work_tile_of(work_tile_of_round(round + __ffs(left) - 1));
                load(work_tile);
            }
        }
        if (threadIdx.x == 0) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(work_tile_stage_).invalidate();
            mbarrier_arrive(query_pipeline_.full());
        }
        cp_async_commit();
        cp_async_wait<0>();
    }

private:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;
    static constexpr int kWarpKeys = kKeys / 4;
    using KvTile = typename SharedStorage::KvTile;
    static_assert(kBias != BiasKind::kDense && SharedStorage::kRows == KeyListsView::kRows &&
                  kKeys % KeyListsView::kAlign == 0);

    __device__ __forceinline__ FwdWorkTile work_tile_of(unsigned index) const {
        FwdWorkTile work_tile(p_, scheduler_, index, kRows / scheduler_.qheads_per_tile);
        work_tile.head *= scheduler_.qheads_per_tile;
        return work_tile;
    }

    // Produces stages in the order in which the consumers wait: K of the first n_block and Q, then K of an n_block
    // before V of the previous one.
    __device__ __forceinline__ void load(FwdWorkTile& work_tile) {
        const QueryHead head(p_, work_tile.head);
        const KeyList list(p_, work_tile.s, head, work_tile.first_row);
        const int rows = kRows / scheduler_.qheads_per_tile;
        const int num_n_blocks = list.template count_n_blocks<kKeys>(p_, work_tile.s, work_tile.first_row + rows);
        work_tile.n_blocks = {0, num_n_blocks};
        const T* keys = key_rows<const T>(p_.key, work_tile.s, head.kv_head);
        const T* values = key_rows<const T>(p_.value, work_tile.s, head.kv_head);
        const ListReader<T, kBias> reader(p_, work_tile.s, head, work_tile.first_row, list, rows);
        ListPrefetcher<T, kBias, kKeys> prefetcher(reader, list, lane_key(), 0, num_n_blocks);
        int position = -1;
        for (int n_block = 0; n_block <= num_n_blocks; ++n_block) {
            const int previous_position = position;
            if (n_block < num_n_blocks) {
                position = produce_metadata(prefetcher);
                prefetcher.advance();
                gather(smem_.key[key_pipeline_.stage()], keys, p_.key.row_stride, position);
                mbarrier_arrive(key_pipeline_.full());
                cp_async_mbarrier_arrive_noinc(key_pipeline_.full());
                key_pipeline_.advance();
            }
            if (n_block == 0) {
                load_q(work_tile);
            } else {
                value_pipeline_.producer_acquire();
                gather(smem_.value[value_pipeline_.stage()], values, p_.value.row_stride, previous_position);
                cp_async_mbarrier_arrive_noinc(value_pipeline_.full());
                value_pipeline_.advance();
            }
        }
    }

    __device__ __forceinline__ void load_q(const FwdWorkTile& work_tile) {
        if (threadIdx.x == 0) {
            query_pipeline_.producer_acquire();
            smem_.work_tile(work_tile_stage_) = work_tile;
            mbarrier_arrive_and_expect_tx(query_pipeline_.full(), sizeof(typename SharedStorage::QueryTile));
            for (int i = 0; i < scheduler_.qheads_per_tile; ++i)
                tma_load_rows(smem_.query[query_pipeline_.stage()], maps_.query, query_pipeline_.full(), p_,
                              work_tile.s, work_tile.s.first_row + work_tile.first_row, work_tile.head + i,
                              i * kWarpgroupRows);
        }
        work_tile_stage_ = SharedStorage::next_work_tile_stage(work_tile_stage_);
        query_pipeline_.advance();
    }

    // Writes which rows see the keys, and the keys' biases. Returns the position of this lane's key, or -1 where no row
    // sees it.
    __device__ __forceinline__ int produce_metadata(const ListPrefetcher<T, kBias, kKeys>& prefetcher) {
        uint32_t words[KeyList::kWords];
        float bias;
        const int position = prefetcher.resolve(words, bias);
        // pack-GQA: rows 64 to 127 are those of the next query head, which see the same keys.
        if (scheduler_.qheads_per_tile > 1) words[2] = words[0], words[3] = words[1];
        key_pipeline_.producer_acquire();
        auto& metadata = smem_.metadata[key_pipeline_.stage()];
        if (lane_id() < kWarpKeys) {
#pragma unroll
            for (int w = 0; w < kRows / 32; ++w) metadata.mask[w][lane_key()] = words[w];
        }
        if constexpr (kBias == BiasKind::kKey)
            metadata.key_bias.store(warp_id(), lane_key(), lane_id() < kWarpKeys, bias, params_.softmax.inverse_scale);
        return position;
    }

    // The key of this lane in an n_block. Two lanes share one where a warp has 16.
    static __device__ __forceinline__ int lane_key() { return warp_id() * kWarpKeys + lane_id() % kWarpKeys; }
    // Gathers this warp's rows of K or V; `position` belongs to this lane's key.
    __device__ __forceinline__ void gather(KvTile& to, const T* rows, int64_t row_stride, int position) const {
        gather_rows<kWarpKeys>(to, warp_id() * kWarpKeys, rows, row_stride, position, static_cast<int>(p_.head_dim));
    }

    const FwdArgs& p_;
    const FwdKernelParams& params_;
    const FwdTileSchedulerParams& scheduler_;
    const FwdTensorMaps& maps_;
    SharedStorage& smem_;
    Pipeline<Traits::kQueryStages> query_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_;
    Pipeline<Traits::kValueStages> value_pipeline_;
    int work_tile_stage_ = 0;
};

}  // namespace flash_dmattn::cuda::sm90
