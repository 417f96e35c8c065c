// Block sizes, stages and registers of the sparse backward kernels, and what their shared storage has in common.
#pragma once

#include <cuda.h>

#include "cuda/plan.h"
#include "cuda/sm90/bwd/kernel_traits.h"
#include "key_fragment.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T, int kHeadDim>
struct PerHeadSparseBwdKernelTraits : BwdMmaTraits<T, kHeadDim, KeyListsView::kRows, 128> {
    static constexpr int kKeyStages = kHeadDim > 64 ? 1 : 2, kValueStages = kKeyStages;
    static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
    using DkvStages = KeyGradientStages<64, 3>;
};

// kRows: of a mainloop step. Above head dimension 64 it is 64: more rows would take too many registers.
template <typename T, int kHeadDim, int kRows>
struct GroupedSparseBwdKernelTraits : BwdMmaTraits<T, kHeadDim, kRows, grouped_block_n(kHeadDim)> {
    // Whether shared memory has room to stage dQ, so that TMA adds it to global memory.
    static constexpr bool kStagesDq = kHeadDim == 192;
    static constexpr bool kIsLarge = kHeadDim > 64;
    static constexpr int kProducerRegisters = kIsLarge ? 40 : 56, kConsumerRegisters = kIsLarge ? 232 : 224;
    static_assert(GroupedSparseBwdKernelTraits::kKeys % KeyListsView::kAlign == 0);
    using DkvStages = KeyGradientStages<64, 3>;
};

// TMA tensor maps: [D, heads, S, B].
struct SparseBwdTensorMaps {
    CUtensorMap query, dout;
};

// A member of shared storage whose type has a constructor.
template <typename X>
struct Uninitialized {
    alignas(X) unsigned char bytes[sizeof(X)];
    __device__ X& get() { return reinterpret_cast<X&>(bytes); }
};

}  // namespace flash_dmattn::cuda::sm90
