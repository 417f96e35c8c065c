// The factors of scores of the dense and sparse backward kernels.
#pragma once

#include "cuda/common/basics.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// A kernel parameter, in float32: a kernel would convert the arguments of the call, doubles, in each step.
struct BwdScale {
    float scale, scale_log2;  // the softmax scale; times log2(e)
    float softcap;            // 0: none

    explicit BwdScale(const BwdArgs& p)
        : scale(static_cast<float>(p.softmax_scale)), scale_log2(scale * kLog2E),
          softcap(static_cast<float>(p.softcap)) {}
};

}  // namespace flash_dmattn::cuda::sm90
