// How kernels that loop over the contributors of a bias, the (batch element, head) pairs that share it, divide them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/basics.cuh"
#include "cuda/common/device.h"

namespace flash_dmattn::cuda::sm90 {

// The number of CTAs among which the contributors of a tile are split; an SM has one CTA. The CTAs of a split loop over
// the same contributors at the same time, so that the L2 cache serves Q, K and V.
inline int64_t choose_splits(int64_t tiles, int64_t contributors, int64_t max_waves = 4) {
    const int64_t num_sms = current_device().num_sms;
    const int64_t max_splits = std::min(contributors, std::max<int64_t>(max_waves * num_sms / tiles, 1));
    int64_t best = 1, least = INT64_MAX / 64;
    for (int64_t splits = 1; splits <= max_splits; ++splits) {
        const int64_t steps = ceil_div(tiles * splits, num_sms) * ceil_div(contributors, splits);  // of an SM
        // Each split loads the biases and stores the gradients again: it must save 2 %.
        if (steps * 50 >= least * 49) continue;
        best = splits;
        least = steps;
    }
    return best;
}

}  // namespace flash_dmattn::cuda::sm90
