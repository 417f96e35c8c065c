#include "cuda_backend.h"

namespace flash_dmattn {
namespace {

[[noreturn]] void refuse(const Tensor& tensor) {
    TORCH_CHECK(false, "flash_dmattn was built without CUDA kernels (" FLASH_DMATTN_WHY_NO_CUDA "), got tensors on ",
                tensor.device());
}

}  // namespace

void forward_cuda(FwdParams&, const Inputs& inputs) { refuse(inputs.query); }
void backward_cuda(BwdParams&, const Inputs& inputs) { refuse(inputs.query); }
bool decode_kvcache_cuda(const KvCacheParams&, const Tensor& like, bool) { refuse(like); }
std::optional<GatheredCache> gather_best_keys_cuda(const KvCacheParams&, const Tensor& like, const Tensor&) {
    refuse(like);
}
std::optional<GatheredCache> gather_all_keys_cuda(const KvCacheParams&, const Tensor& like, const OptionalTensor&) {
    refuse(like);
}
std::optional<int64_t> attend_in_cache_cuda(const KvCacheParams&, const Tensor& query, const Tensor&) { refuse(query); }
std::tuple<Tensor, Tensor> pack_mask(const Tensor& mask, int64_t, int64_t, bool, const OptionalTensor&,
                                     const OptionalTensor&) {
    refuse(mask);
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_and_list_mask(const Tensor& mask, int64_t, int64_t, bool,
                                                                      int64_t) {
    refuse(mask);
}
std::tuple<Tensor, Tensor, Tensor> build_bounded_lists(const AttentionParams&, const Tensor& source, int64_t) {
    refuse(source);
}
std::tuple<Tensor, Tensor, Tensor> build_counted_lists(AttentionParams, const Tensor& source) { refuse(source); }
void build_index_lists(const IndexListsParams&, const IndexListsPlan&, const Tensor& indices, int32_t*, int64_t*,
                       int64_t*, uint32_t*) {
    refuse(indices);
}
Tensor topk_intervals(const Tensor& bias, int64_t, int64_t, const OptionalTensor&, const OptionalTensor&,
                      std::optional<int64_t>) {
    refuse(bias);
}
void select_key_lists(const SelectParams&, const SelectedListsPlan&, const Tensor& bias, int32_t*, int64_t*, int64_t*,
                      uint32_t*) {
    refuse(bias);
}

}  // namespace flash_dmattn
