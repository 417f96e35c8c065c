// Stages of shared memory that producers fill and consumers empty in turn.
#pragma once

#include "mbarrier.cuh"

namespace flash_dmattn::cuda {

// Where a thread is in a pipeline: at a stage, and how often, modulo 2, it has been there before.
template <int kStages>
class PipelineState {
public:
    __device__ __forceinline__ int stage() const { return stage_; }
    __device__ __forceinline__ int phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++stage_ == kStages) {
            stage_ = 0;
            phase_ ^= 1;
        }
    }
    __device__ __forceinline__ int last_stage() const { return stage_ == 0 ? kStages - 1 : stage_ - 1; }

private:
    int stage_ = 0, phase_ = 0;
};

// The barriers of a pipeline, in shared memory.
template <int kStages>
struct PipelineBarriers {
    alignas(8) uint64_t full[kStages];   // completes when a stage has been filled,
    alignas(8) uint64_t empty[kStages];  // when everybody is done with it

    // By one thread, before anybody waits.
    __device__ void init(int producers, int consumers) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&full[stage]), producers);
            mbarrier_init(smem_address(&empty[stage]), consumers);
        }
    }
    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& at) const {
        mbarrier_wait(smem_address(&full[at.stage()]), at.phase());
    }
    // This warp is done with the stage; its lanes call together.
    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(smem_address(&empty[stage]));
    }
};

template <int kStages>
class Pipeline : public PipelineState<kStages> {
public:
    __device__ __forceinline__ explicit Pipeline(PipelineBarriers<kStages>& barriers)
        : barriers_(smem_address(&barriers)) {}

    __device__ __forceinline__ uint32_t full() const { return barriers_ + this->stage() * 8; }
    __device__ __forceinline__ uint32_t empty() const { return barriers_ + (kStages + this->stage()) * 8; }
    __device__ __forceinline__ void consumer_wait() const { mbarrier_wait(full(), this->phase()); }
    // At first every stage is.
    __device__ __forceinline__ void producer_acquire() const { mbarrier_wait(empty(), this->phase() ^ 1); }
    // This warp is done with the stage, or the one before; its lanes call together.
    __device__ __forceinline__ void release() const { release(this->stage()); }
    __device__ __forceinline__ void consumer_release_previous() const { release(this->last_stage()); }

private:
    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(barriers_ + (kStages + stage) * 8);
    }

    uint32_t barriers_;
};

}  // namespace flash_dmattn::cuda
