// From params to the instantiation of their head dimension and dtype.
#include "fwd.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../attention.h"
#include "../common/check.h"
#include "kernels.h"  // generated: FLASH_DMATTN_FOR_EACH_FWD(X), X(T, head dimension) for what is built
#include "serves.cuh"

namespace flash_dmattn {
namespace cuda {

FwdPacking fwd_packing(const AttentionParams& p) {
    const int64_t group = p.heads / p.kv_heads;
    // A tile has one list of keys, or one summary of the mask, and one row of the key bias.
    const auto shared = [&](const auto& view) { return !view.present() || view.heads <= p.kv_heads; };
    const bool can_pack = shared(p.packed_mask) && shared(p.intervals) && shared(p.lists) && shared(p.bias);
    // The fewer query rows a tile has, the more alike are the keys that they see; of a mask's tiles none is gained.
    const bool packs = can_pack && (p.lists.present() || p.seqlen_q * group <= kFewRows);
    const int64_t heads = packs ? group : 1;
    return {p.seqlen_q * heads, static_cast<int>(heads)};
}

}  // namespace cuda

int64_t plan_fwd_splits(const AttentionParams& p) {
    using namespace cuda;
    constexpr int64_t kBlocksPerMultiprocessor = 3, kMostSplits = 64, kFewestKeys = 256;
    if (p.batch == 0 || p.heads == 0) return 1;
    const FwdPacking packing = fwd_packing(p);
    if (packing.rows > kFewRows) return 1;
    const int64_t multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    const int64_t blocks = p.batch * p.heads / packing.heads;
    // How long lists are is known on the device alone; blocks for which a list has no tile left see nothing.
    return std::clamp<int64_t>(multiprocessors * kBlocksPerMultiprocessor / blocks, 1,
                               std::clamp<int64_t>(p.seqlen_k / kFewestKeys, 1, kMostSplits));
}

void mha_fwd_cuda(const FwdParams& p, cudaStream_t stream) {
    using namespace cuda;
    if (p.batch == 0 || p.heads == 0 || p.seqlen_q == 0) return;
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (serves<T, kHeadDim>(p))       \
        return p.lists.present() ? run_gather_fwd<T, kHeadDim>(p, stream) : run_fwd<T, kHeadDim>(p, stream);
    FLASH_DMATTN_FOR_EACH_FWD(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
    throw std::runtime_error("no forward kernel was built for this dtype and head dimension " + std::to_string(p.head_dim) +
                             ": see FLASH_DMATTN_DTYPES and FLASH_DMATTN_HEAD_DIMS");
}

}  // namespace flash_dmattn
