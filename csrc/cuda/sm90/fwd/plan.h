// The sm90 forward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/basics.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Whether these kernels are faster than sm80's, as measured on an H200: with few keys they are not.
bool should_use_fwd(const FwdParams& params);
// Selects the kernel. Returns false where none supports the call (docs/kernels.md, "Which kernels serve a call").
bool plan_fwd(const FwdParams& params, FwdPlan& plan);

// Over key lists sm80's kernel is faster at small head dimensions.
constexpr bool has_list_kernel(int64_t head_dim) { return head_dim > 32; }

struct FwdTileSchedulerParams {
    unsigned num_work_tiles;
    FastDivmod num_m_blocks;        // of one head; if packs_m_blocks, of all sequences
    FastDivmod swizzle;             // L2 swizzle: (head, batch) pairs of a section; divides their number
    FastDivmod inner;               // H / qheads_per_tile, or B if batch_first
    int32_t* tile_count_semaphore;  // the dynamic scheduler's counter; null: static. Unused over lists
    int qheads_per_tile;            // gathered keys: one query head per MMA warpgroup, or 1; else 1
    bool packs_m_blocks;            // m_blocks of packed sequences are numbered as in common/packed_blocks.cuh
    bool batch_first;               // pairs are numbered batch by batch, so that L2 serves a shared dense bias
};

// The tile scheduler of a launch, and its CTAs.
struct FwdGrid {
    FwdTileSchedulerParams scheduler{};
    unsigned num_ctas = 0;
};
// Whether the tall tile is faster than that of `rows` rows. head_dim: the kernel's.
bool should_use_tall_tile(const FwdArgs& p, int head_dim, int rows, int tall_rows);
// rows: of a work tile. gathers: over key lists.
FwdGrid plan_grid(const FwdArgs& p, int rows, int qheads_per_tile, bool gathers);

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
