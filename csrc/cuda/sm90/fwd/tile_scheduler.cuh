// The tile scheduler of the forward: which work tiles, (m_block, head, batch), a CTA processes, and in which order.
//
// Longest first (LPT) with an L2 swizzle, as in FlashAttention-3: the (head, batch) pairs are divided into sections
// of `swizzle`. Within a section the m_block varies slowest, the last one first: under causality it is the longest.
// Sections run one after another, so that L2 holds the K and V of the section in progress. plan_grid selects sections
// and scheduler (docs/kernels.md).
//
// Static persistent CTAs process work tiles in rounds. CTA i has the i-th work tile of a round, and the i-th from the
// end of the next: if lengths change evenly, all CTAs have about as much work. Dynamic persistent CTAs take the next
// work tile of the same order from a counter.
//
// Where most packed sequences are far shorter than the longest one, the m_blocks of all are numbered consecutively
// (packs_m_blocks in common/packed_blocks.cuh): as one sequence of all heads, in one section.
#pragma once

#include "cuda/arch/pipeline.cuh"
#include "cuda/common/packed_blocks.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/mask/block_mask_iterator.cuh"
#include "plan.h"

namespace flash_dmattn::cuda::sm90 {

// A work tile: an m_block of one head, or of qheads_per_tile heads from `head` on.
class FwdWorkTile {
public:
    Sequence s;
    int head;
    int first_row;          // in the sequence
    BlockRange n_blocks{};  // that the producer loads; only if the consumers count them

    __device__ FwdWorkTile(const FwdArgs& p, const FwdTileSchedulerParams& scheduler, unsigned index, int rows) {
        FlatIndex rest(index);
        const int in_section = rest.pop(scheduler.swizzle), m_block = rest.pop(scheduler.num_m_blocks);
        FlatIndex pair(rest.rest * scheduler.swizzle.value + in_section);
        const int inner = pair.pop(scheduler.inner), outer = static_cast<int>(pair.rest);
        head = scheduler.batch_first ? outer : inner;
        const int number = static_cast<int>(scheduler.num_m_blocks.value) - 1 - m_block;
        const int batch = scheduler.batch_first ? inner : outer;
        const NumberedMBlock block(p, scheduler.packs_m_blocks, number, batch, rows);
        first_row = block.first_row;
        s = Sequence(p, block.batch);
    }
    // Whether the m_block lies beyond the rows of its sequence.
    __device__ bool is_empty() const { return first_row >= s.rows; }
    // The keys that some of the m_block's rows [begin, end) see are below this, but for a mask.
    __device__ __forceinline__ int end_of_keys(int begin, int end, bool is_causal) const {
        const int end_row = min(first_row + end, s.rows);
        return first_row + begin < end_row ? s.keys_of(end_row - 1, is_causal) : 0;
    }

    // The producer passes an invalid work tile to the consumers after its last one.
    __device__ bool is_valid() const { return head != kInvalidHead; }
    __device__ void invalidate() { head = kInvalidHead; }

private:
    static constexpr int kInvalidHead = -1;
};

// Static: the work tile of this CTA in a round. Every other round runs backwards.
__device__ __forceinline__ unsigned work_tile_of_round(unsigned round) {
    return round % 2 == 0 ? round * gridDim.x + blockIdx.x : (round + 1) * gridDim.x - 1 - blockIdx.x;
}

// Dynamic: warp 0 of the producer takes the index of the next work tile from a counter. The other three read it from
// here. A warp may be two work tiles ahead of the slowest.
struct FwdWorkTilePipeline {
    static constexpr int kStages = 2, kReaders = 3;

    unsigned index[kStages];
    PipelineBarriers<kStages> barriers;

    // One thread calls.
    __device__ void init() { barriers.init(1, kReaders); }
};

// One for each producer warp: all warps take the same work tiles.
class FwdTileScheduler {
public:
    struct WorkTileInfo {
        unsigned index;

        __device__ __forceinline__ bool is_valid(const FwdTileSchedulerParams& params) const {
            return index < params.num_work_tiles;
        }
    };

    __device__ FwdTileScheduler(const FwdTileSchedulerParams& params, FwdWorkTilePipeline& pipeline)
        : params_(params), pipeline_(pipeline) {}

    __device__ __forceinline__ WorkTileInfo get_initial_work() const { return {blockIdx.x}; }
    // kThreads: threads of the warp that call: 1, which is lane 0, or 32.
    template <int kThreads>
    __device__ __forceinline__ WorkTileInfo next_work() {
        static_assert(kThreads == 1 || kThreads == 32);
        if (params_.tile_count_semaphore == nullptr) return {work_tile_of_round(++round_)};
        unsigned& shared = pipeline_.index[state_.stage()];
        unsigned index;
        if (warp_id() == 0) {
            if (lane_id() == 0) {
                index = gridDim.x + atomicAdd(params_.tile_count_semaphore, 1);
                pipeline_.barriers.producer_acquire(state_);
                shared = index;
                mbarrier_arrive(smem_address(&pipeline_.barriers.full[state_.stage()]));
            }
            if (kThreads > 1) index = __shfl_sync(~0u, index, 0);
        } else {
            pipeline_.barriers.consumer_wait(state_);
            index = shared;
            if (kThreads > 1) __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(smem_address(&pipeline_.barriers.empty[state_.stage()]));
        }
        state_.advance();
        return {index};
    }

private:
    const FwdTileSchedulerParams& params_;
    FwdWorkTilePipeline& pipeline_;
    PipelineState<FwdWorkTilePipeline::kStages> state_;  // dynamic
    unsigned round_ = 0;                                 // static
};

}  // namespace flash_dmattn::cuda::sm90
