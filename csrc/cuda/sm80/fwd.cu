// From params to the instantiation of their head dimension and dtype.
#include "fwd.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../attention.h"
#include "../common/check.h"
#include "../common/ptx.cuh"
#include "kernels.h"  // generated: FLASH_DMATTN_FOR_EACH_FWD(X), X(T, head dimension) for what is built

namespace flash_dmattn {
namespace cuda {

FwdPacking fwd_packing(const AttentionParams& p) {
    const int64_t group = p.heads / p.kv_heads;
    // A tile has one summary of the mask and one row of the key bias.
    const auto shared = [&](int64_t heads) { return heads <= p.kv_heads; };
    const bool can_pack = (!p.packed_mask.present() || shared(p.packed_mask.heads)) &&
                          (!p.bias.present() || shared(p.bias.heads));
    const int64_t heads = can_pack && p.seqlen_q * group <= kFewRows ? group : 1;
    return {p.seqlen_q * heads, static_cast<int>(heads)};
}

}  // namespace cuda

int64_t plan_fwd_splits(const AttentionParams& p) {
    using namespace cuda;
    constexpr int64_t kBlocksPerMultiprocessor = 3, kMostSplits = 64, kFewestKeys = 256;
    const FwdPacking packing = fwd_packing(p);
    if (packing.rows > kFewRows || p.batch == 0 || p.heads == 0) return 1;
    int device = 0, multiprocessors = 0;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    FLASH_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    const int64_t blocks = p.batch * p.heads / packing.heads;
    return std::clamp<int64_t>(multiprocessors * kBlocksPerMultiprocessor / blocks, 1,
                               std::clamp<int64_t>(p.seqlen_k / kFewestKeys, 1, kMostSplits));
}

void mha_fwd_cuda(const FwdParams& p, cudaStream_t stream) {
    using namespace cuda;
    if (p.batch == 0 || p.heads == 0 || p.seqlen_q == 0) return;
#define FLASH_DMATTN_RUN(T, kHeadDim)                                                                          \
    if (p.head_dim <= kHeadDim && p.dtype == (std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16)) \
        return run_fwd<T, kHeadDim>(p, stream);
    FLASH_DMATTN_FOR_EACH_FWD(FLASH_DMATTN_RUN)  // by rising head dimension
#undef FLASH_DMATTN_RUN
    throw std::runtime_error("no forward kernel was built for this dtype and head dimension " + std::to_string(p.head_dim) +
                             ": see FLASH_DMATTN_DTYPES and FLASH_DMATTN_HEAD_DIMS");
}

}  // namespace flash_dmattn
