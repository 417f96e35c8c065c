// The kernels that were built, as a table that a plan searches by dtype and head dimension.
//
// kernels.h, which scripts/generate_kernels.py writes, has one list for each architecture and direction, such as
//     #define FLASH_DMATTN_SM90_FWD_KERNELS(X) X(half_t, 64) X(bfloat16_t, 64) X(half_t, 128) X(bfloat16_t, 128)
// by ascending head dimension. A list may be empty. A table holds a launcher for each X:
//     const KernelTable<FwdLauncher> kKernels(FLASH_DMATTN_LAUNCHERS(FLASH_DMATTN_SM90_FWD_KERNELS, run_fwd));
#pragma once

#include <type_traits>
#include <vector>

#include "params.h"
#include "basics.cuh"

namespace flash_dmattn::cuda {

template <typename T_, int kHeadDim_>
struct KernelInstance {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr DataType kDataType = std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16;
};

template <typename... Instances>
struct KernelInstances {};

// `void` precedes the instances because a macro cannot leave out the first comma.
#define FLASH_DMATTN_INSTANCE(T, kHeadDim) , KernelInstance<T, kHeadDim>
#define FLASH_DMATTN_INSTANCES(KERNELS) KernelInstances<void KERNELS(FLASH_DMATTN_INSTANCE)>()
// The instances and, for each, the function template's instantiation.
#define FLASH_DMATTN_LAUNCHERS(KERNELS, function)                   \
    FLASH_DMATTN_INSTANCES(KERNELS), [](auto instance) {            \
        using Instance = decltype(instance);                        \
        return &function<typename Instance::T, Instance::kHeadDim>; \
    }

// Value: a launcher, or a struct of what belongs to an instance.
template <typename Value>
class KernelTable {
public:
    struct Entry {
        DataType dtype;
        int head_dim;
        Value value;
    };

    // make(KernelInstance<..>()) returns the value of an instance.
    template <typename... Instances, typename Make>
    KernelTable(KernelInstances<void, Instances...>, const Make& make)
        : entries_{Entry{Instances::kDataType, Instances::kHeadDim, make(Instances())}...} {}

    // The entry of the problem's dtype with the smallest sufficient head dimension; null where none was built.
    template <typename Params>
    const Entry* find(const Params& p) const {
        for (const Entry& entry : entries_)
            if (entry.dtype == p.dtype && p.head_dim <= entry.head_dim) return &entry;
        return nullptr;
    }

private:
    std::vector<Entry> entries_;
};

}  // namespace flash_dmattn::cuda
