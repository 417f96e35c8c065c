// How the two MMA warpgroups of a backward kernel split each GEMM.
#pragma once

#include "params.h"
#include "cuda/arch/smem_tile.cuh"
#include "cuda/sm90/tile_sizes.h"

namespace flash_dmattn::cuda::sm90 {

constexpr int kBwdConsumerWarpgroups = 2;                               // MMA warpgroups
constexpr int kBwdProducerRegisters = 40, kBwdConsumerRegisters = 232;  // per thread

// Entries that end in WG1 start one barrier per MMA warpgroup.
struct BwdNamedBarriers {
    enum : int {
        kConsumers = 1,         // both MMA warpgroups: P and dS are complete in shared memory
        kWarpgroupSyncWG1 = 2,  // the threads of one MMA warpgroup
        kProducer = 4,          // the threads of the producer
        // The other warpgroup has read this one's dS. Only the per-head sparse kernel, which has no kWarpgroupSyncWG1.
        kDscoresReadWG1 = kWarpgroupSyncWG1,
    };
};

// What the dense and the sparse backward kernels share: tiles in shared memory, and how two warpgroups divide the
// GEMMs.
// S and dP are transposed (keys x rows): P and dS are then A operands in registers of dV = P dO and dK = dS Q.
//
//   accumulator   M x N             K          split of 128 keys               split of 64 keys (kSharesKeys)
//   S, dP         keys x rows       head_dim   M: 64 keys each                 N: kScoreRows rows each
//   dK, dV        keys x head_dim   rows       M: 64 keys each                 N: kDkvCols columns each
//   dQ            rows x head_dim   keys       M (128 rows) or N (64 rows)     N: kDqCols columns each
//   dQ^T          head_dim x rows   keys       M (80 rows): kDqCols each
//
// 64 keys: above head dimension 128, dK and dV of 64 keys fill the registers of one warpgroup.
template <typename T_, int kHeadDim_, int kRows_, int kKeys_>
struct BwdMmaTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_, kRows = kRows_, kKeys = kKeys_;
    static constexpr int kConsumerWarpgroups = kBwdConsumerWarpgroups;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    static constexpr int kStages = 2;  // of Q, dO, and a dense bias or dS
    static constexpr bool kSharesKeys = kKeys == 64;
    static constexpr int kScoreRows = kSharesKeys ? kRows / kConsumerWarpgroups : kRows;
    static constexpr int kDkvCols = kSharesKeys ? kHeadDim / kConsumerWarpgroups : kHeadDim;
    static constexpr bool kSplitsDqRows = kRows == 64 * kConsumerWarpgroups;
    static constexpr bool kTransposesDq = kRows % 64 != 0;  // M of wgmma is 64
    static constexpr int kDqCols = kSplitsDqRows ? kHeadDim : kHeadDim / kConsumerWarpgroups;
    static constexpr int kDqN = kTransposesDq ? kRows : kDqCols;
    static_assert((kSharesKeys || kKeys == 64 * kConsumerWarpgroups) &&
                  (kSplitsDqRows || (kTransposesDq ? kDqCols == 64 : kRows == 64 && kDqCols % 32 == 0)));

    static constexpr int kSlabCols = kDkvCols % 64 == 0 ? 64 : 32;  // each warpgroup's columns begin with a slab
    using RowsTile = SmemTile<T, kRows, kHeadDim, kSlabCols>;       // Q, dO
    using KvTile = SmemTile<T, kKeys, kHeadDim, kSlabCols>;         // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;                   // dense bias, P, dS
    static_assert(ScoresTile::kSlabCols == 64, "one slab for each 64 keys");
};

// kServesMasksAndSoftcap_: whether these are compiled.
template <typename T, int kHeadDim, int kRows, bool kServesMasksAndSoftcap_>
struct BwdKernelTraits : BwdMmaTraits<T, kHeadDim, kRows, bwd_tile_sizes(kHeadDim).keys> {
    using MmaTraits = BwdMmaTraits<T, kHeadDim, kRows, BwdKernelTraits::kKeys>;
    static constexpr bool kServesMasksAndSoftcap = kServesMasksAndSoftcap_;
    static constexpr bool kIsTall = has_tall_bwd_tile(kHeadDim) && kRows == kTallBwdRows;
    static_assert(!(kIsTall && kServesMasksAndSoftcap));
    static constexpr int kProducerRegisters = kIsTall ? 24 : kBwdProducerRegisters,
                         kConsumerRegisters = kIsTall ? 240 : kBwdConsumerRegisters;
    static constexpr int kWords = BwdKernelTraits::kKeys / 32;
    // Whether shared memory has room to stage dQ, so that TMA adds it to global memory.
    static constexpr bool kStagesDq = !BwdKernelTraits::kSharesKeys;
};

}  // namespace flash_dmattn::cuda::sm90
