// The table of architectures. docs/adding.md lists what a new one needs.
#pragma once

#include "cuda/plan.h"
#include "cuda/sm80/bwd/plan.h"
#include "cuda/sm80/fwd/plan.h"
#include "cuda/sm90/bwd/plan.h"
#include "cuda/sm90/fwd/plan.h"

namespace flash_dmattn::cuda {

// The forward or the backward of an architecture.
template <typename Params, typename Plan>
struct Direction {
    // Whether the kernels are faster than those of the rows below; null: the choice of last resort.
    bool (*should_use)(const Params& params);
    // Selects the kernels and divides the work among CTAs. Returns false and leaves `plan` unchanged where no kernel
    // that supports the call was built.
    bool (*plan)(const Params& params, Plan& plan);
};

struct Architecture {
    const char* name;         // as FLASH_DMATTN_ARCH names it
    int capability;           // compute capability: 90 for 9.0
    bool forward_compatible;  // whether the kernels run on later compute capabilities
    Direction<FwdParams, FwdPlan> fwd;
    Direction<BwdParams, BwdPlan> bwd;

    bool runs_on(int device_capability) const {
        return device_capability == capability || (forward_compatible && device_capability > capability);
    }
};

// In order of preference.
inline constexpr Architecture kArchitectures[] = {
    // wgmma, TMA, clusters
    {"sm90", 90, false, {sm90::should_use_fwd, sm90::plan_fwd}, {sm90::should_use_bwd, sm90::plan_bwd}},
    // mma.sync, cp.async
    {"sm80", 80, true, {nullptr, sm80::plan_fwd}, {nullptr, sm80::plan_bwd}},
};

}  // namespace flash_dmattn::cuda
