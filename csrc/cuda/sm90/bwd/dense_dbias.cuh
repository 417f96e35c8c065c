// The gradient of a dense bias: a thread of the producer stores dS of each m_block from shared memory.
//
// Batch elements that share a bias reduce its gradient serially, like the CTAs of a serial split-K GEMM: the CTA of the
// first one stores its tiles, and each of the others adds its own tiles by TMA reductions in the bias's dtype, after
// the CTA before it. So the order of the additions is fixed. The CTAs run concurrently, and the tiles are still in the
// L2 cache. The progress counter of a CTA is a position in the order of m_blocks: the CTA and those before it have
// completed their tiles of all earlier positions.
#pragma once

#include <climits>

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/tma.cuh"
#include "shared_storage.cuh"
#include "tile_scheduler.cuh"
#include "workspace.cuh"

namespace flash_dmattn::cuda::sm90 {

// Called by a single thread. Its state is in shared memory: the producer has no free registers.
template <typename Traits>
class DenseDbiasStore {
public:
    using SharedStorage = BwdSharedStorage<Traits, BiasKind::kDense>;

    __device__ DenseDbiasStore(const BwdArgs& p, const BwdTensorMaps& maps, SharedStorage& smem,
                               const BwdWorkTile& work_tile)
        : p_(p), maps_(maps), smem_(smem), work_tile_(work_tile) {}

    // Assigns a stage to an m_block. First stores the gradient of the m_block that had it before.
    __device__ __forceinline__ void begin(int stage, int head, int m_block) const {
        if (!stores_dense_dbias(p_)) return;
        store(stage);
        smem_.dense_dbias.tiles[stage] = {head, m_block};
    }
    __device__ __forceinline__ void finish() const {
        if (!stores_dense_dbias(p_)) return;
#pragma unroll 1
        for (int i = 0; i < Traits::kStages; ++i) store(smem_.dense_dbias.stores % Traits::kStages);
        constexpr int kEnd = INT_MAX;
        wait_for_previous_cta(kEnd);
        release(kEnd);
    }

private:
    // Returns when TMA has read the tile from shared memory.
    __device__ __forceinline__ void store(int stage) const {
        auto& state = smem_.dense_dbias;
        const auto [head, m_block] = state.tiles[stage];
        if (m_block < 0) return;
        mbarrier_wait(smem_address(&state.dscores_full[stage]), state.stores / Traits::kStages % 2);
        // A step after the last store, which has most likely completed: a wait right after it was slower.
        release(state.position);
        state.position = position(head, m_block) + 1;
        wait_for_previous_cta(state.position);
#pragma unroll 1
        for (int slab = 0; slab < Traits::ScoresTile::kSlabs; ++slab) {
            const uint32_t from = smem_address(smem_.bias_dscores[stage].data + slab * Traits::kRows * 64);
            const int key = work_tile_.n_block * Traits::kKeys + slab * 64, row = m_block * Traits::kRows;
            if (is_first()) {
                tma_store_4d(&maps_.dbias, from, key, row, head, smem_.bias_batch);
            } else {
                tma_reduce_add_4d(&maps_.dbias, from, key, row, head, smem_.bias_batch);
            }
        }
        tma_store_commit_group();
        tma_store_wait_group_read();
        state.tiles[stage].m_block = -1;
        ++state.stores;
    }

    __device__ bool is_serial() const { return p_.dense_dbias == DenseDbias::kSerialReduce; }
    // Without a serial reduction every CTA is a first one.
    __device__ bool is_first() const { return work_tile_.batch_rank == 0; }
    // In the order of the producer's for_each_m_block.
    __device__ int position(int head, int m_block) const {
        const int num_m_blocks = ceil_div(smem_.sequence.rows, Traits::kRows);
        return (head - work_tile_.first_head) * num_m_blocks +
               (p_.deterministic ? num_m_blocks - 1 - m_block : m_block);
    }
    __device__ __forceinline__ void wait_for_previous_cta(int position) const {
        if (is_first()) return;
        while (load_acquire(dbias_progress(p_, smem_.work_index - 1)) < position) {}
        fence_proxy_async_global();
    }
    // Waits until the stores so far are complete, then publishes the progress to the next CTA.
    __device__ __forceinline__ void release(int position) const {
        if (!is_serial()) return;
        tma_store_wait_group();
        store_release(dbias_progress(p_, smem_.work_index), position);
    }

    const BwdArgs& p_;
    const BwdTensorMaps& maps_;
    SharedStorage& smem_;
    const BwdWorkTile& work_tile_;
};

}  // namespace flash_dmattn::cuda::sm90
