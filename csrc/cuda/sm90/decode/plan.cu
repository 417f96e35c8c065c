#include "plan.h"

#include <algorithm>
#include <climits>
#include <map>
#include <mutex>
#include <tuple>

#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/common/kernel_table.h"
#include "kernels.h"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {
namespace {

struct DecodeKernel {
    using Launcher = void (*)(const DecodeArgs&, cudaStream_t);
    Launcher launch = nullptr;
    void (*max_active_clusters)(int*, const DecodeArgs&) = nullptr;
};
const KernelTable<DecodeKernel> kKernels(FLASH_DMATTN_INSTANCES(FLASH_DMATTN_SM90_DECODE_KERNELS), [](auto kernel) {
    using T = typename decltype(kernel)::T;
    constexpr int kHeadDim = decltype(kernel)::kHeadDim;
    return DecodeKernel{run_decode<T, kHeadDim>, max_active_decode_clusters<T, kHeadDim>};
});

// The query rows of a sequence that the kernel serves: one where it selects keys. With batch_invariant this must not
// depend on the capacity of the cache.
int64_t max_rows(const KvCacheParams& p) {
    const bool selects = p.window_size > 0 && (p.batch_invariant || p.window_size < p.seqlen_k);
    const int64_t rows = kDecodeMaxRows / std::max<int64_t>(p.heads / std::max<int64_t>(p.kv_heads, 1), 1);
    return selects ? std::min<int64_t>(rows, 1) : rows;
}

bool serves(const KvCacheParams& p) {
    return can_read_cache(p) && (p.window_size == 0 || p.bias_cache.present()) && !p.relative_bias.has_grid() &&
           p.batch * p.kv_heads * kDecodeMaxCluster < INT_MAX / 2 && is_aligned(p.query) && is_aligned(p.out);
}

// The kernel of a call; without one where none serves it.
struct DecodePlan {
    DecodeKernel kernel;
    DecodeArgs args;

    bool serves() const { return kernel.launch != nullptr; }
};

// The selected keys of a CTA, of a sequence of any length up to that of the cache: with batch_invariant shorter
// sequences have fewer splits.
int most_selected(const DecodeArgs& args) {
    int most = 0;
    for (int64_t keys = kInvariantKeys;; keys *= 2) {
        keys = std::min(keys, args.seqlen_k);
        const DecodeSplits splits(args, keys, args.query_tiles);
        most = std::max(most, splits.share(static_cast<int>(std::min(keys, args.window_size))) * splits.per_cta);
        if (keys == args.seqlen_k) return most;
    }
}

// Divides the shared memory for a cluster size, if possible such that max_decode_ctas CTAs share an SM. If it does not
// fit, the tiles reuse the orders; if it still does not fit, there are no candidates. Returns false if orders and list
// alone exceed the device's.
bool lay_out(DecodeArgs& args, int head_dim, int warps, int cluster) {
    args.warps = warps;
    args.cluster = cluster;
    if (args.window_size == 0 || args.window_size >= args.seqlen_k) return true;
    const auto keys = static_cast<int>(args.seqlen_k);
    args.order_capacity = decode_segment(decode_share(keys, cluster), warps) * warps;
    args.list_capacity = most_selected(args);
    const int64_t least = int64_t{args.order_capacity} * 2 + int64_t{args.list_capacity} * 4;
    if (least > current_device().shared_memory) return false;
    const int candidates = args.is_plain ? std::min(args.order_capacity / warps / 2, kDecodeMaxCandidates) : 0;
    constexpr int kReserved = 1024;  // bytes of shared memory that the system takes for each CTA
    for (int ctas = max_decode_ctas(head_dim, warps); ctas > 0; --ctas) {
        const int limit = (current_device().shared_memory + kReserved) / ctas - kReserved;
        const auto fits = [&] { return DecodeSmemLayout(args, head_dim).total <= limit; };
        for (const int capacity : {candidates, 0}) {
            args.candidate_capacity = capacity;
            args.overlays = false;
            args.overlays = !fits();
            if (fits()) return true;
        }
    }
    return true;
}

// The clusters that run at a time; 0 where the device has no room for one.
int active_clusters(const DecodeArgs& args, int head_dim, const DecodeKernel& kernel) {
    const int bytes = DecodeSmemLayout(args, head_dim).total;
    if (bytes > current_device().shared_memory) return 0;
    static std::mutex mutex;
    static std::map<std::tuple<int, DecodeKernel::Launcher, bool, int, int, int>, int> known;
    int device = 0;
    FLASH_CUDA_CHECK(cudaGetDevice(&device));
    const std::lock_guard<std::mutex> lock(mutex);
    const std::tuple key(device, kernel.launch, args.is_plain, args.warps, args.cluster, bytes);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    int clusters = 0;
    kernel.max_active_clusters(&clusters, args);
    return known[key] = clusters;
}

// Chooses the warps and the cluster size of the least estimated time; returns false where none fits. Estimates in us,
// as measured on an H200: for each wave of CTAs 15, 3 more with 16 warps and 3 more with 16 CTAs in a cluster (dense: 8
// in all cases); over the warps 2 ns for a key that a CTA scans, 0.5 ns with room for candidates; for each CTA of an SM
// 16 ns for a key of 128 dimensions that it attends to, more where fewer than 16 warps of the SM attend.
bool choose_grid(DecodeArgs& args, int head_dim, const DecodeKernel& kernel) {
    constexpr int kMinKeysPerCta = 256;
    const bool selects = args.window_size > 0 && args.window_size < args.seqlen_k;
    const auto keys = static_cast<double>(args.seqlen_k);
    const double attends = (selects ? static_cast<double>(args.window_size) : keys) * 0.016 * head_dim / 128;
    const int max_warps = head_dim <= kDecodeManyWarpsHeadDim ? kDecodeMaxWarps : kDecodeMinWarps;
    int best_warps = 0, best_cluster = 0;
    double best_time = 0;
    for (int warps = kDecodeMinWarps; warps <= max_warps; warps *= 2)
        for (int cluster = 1; cluster <= kDecodeMaxCluster; cluster *= 2) {
            if (best_warps > 0 && args.seqlen_k < cluster * kMinKeysPerCta) break;
            if (args.batch_invariant && cluster * warps < invariant_warps(args.seqlen_k)) continue;
            if (!lay_out(args, head_dim, warps, cluster)) continue;
            const int64_t ctas = args.batch * args.kv_heads * cluster;
            const int64_t slots = int64_t{cluster} * active_clusters(args, head_dim, kernel);
            if (slots == 0) continue;
            const int64_t of_sm = ceil_div<int64_t>(std::min(ctas, slots), current_device().num_sms);
            const DecodeSplits splits(args, args.seqlen_k, args.query_tiles);
            const auto attending = static_cast<double>(of_sm * splits.per_cta * splits.warps);
            const double share = of_sm * attends * std::max(1.0, 0.7 + 4.8 / attending),
                         scan = selects ? keys * (args.candidate_capacity > 0 ? 0.0005 : 0.002) / warps : 0;
            const double wave = !selects ? 8 : 15 + (warps > kDecodeMinWarps ? 3 : 0) + (cluster > 8 ? 3 : 0);
            const double time =
                ceil_div(ctas, slots) * (wave + scan / cluster + share / std::min(cluster, splits.count));
            if (best_warps == 0 || time < best_time) best_warps = warps, best_cluster = cluster, best_time = time;
        }
    if (best_warps > 0) lay_out(args, head_dim, best_warps, best_cluster);
    return best_warps > 0;
}

// `rows`: the largest number of query rows of a sequence that is served.
DecodePlan plan_decode(const KvCacheParams& params, int64_t rows) {
    const auto* kernel = serves(params) && rows > 0 ? kKernels.find(params) : nullptr;
    if (kernel == nullptr) return {};
    DecodePlan plan{kernel->value, DecodeArgs(params)};
    DecodeArgs& args = plan.args;
    if (args.cache_batch == 0) args.seqlen_k = 0;
    args.heads_per_kv = FastDivmod(args.heads / args.kv_heads);
    args.kv_heads_divmod = FastDivmod(args.kv_heads);
    args.score_cap = static_cast<float>(args.softcap);
    args.score_scale = static_cast<float>(args.softcap > 0 ? args.softmax_scale / args.softcap : args.softmax_scale);
    args.max_rows = static_cast<int>(std::min(rows, args.seqlen_q));
    args.query_tiles = decode_tiles(args.max_rows * (args.heads / args.kv_heads));
    args.has_vector_bias = args.bias_cache.present() && has_vector_bias(args);
    args.is_plain = args.max_rows == 1 && args.query_tiles == 1 && args.softcap == 0 && !args.relative_bias.present() &&
                    (!args.bias_cache.present() || (args.has_vector_bias && args.bias_cache.dtype == args.dtype));
    if (args.batch > 0 && args.total_q > 0 && !choose_grid(args, kernel->head_dim, kernel->value)) return {};
    return plan;
}

}  // namespace

int64_t decodable_rows(const KvCacheParams& params) {
    const int64_t rows = max_rows(params);
    return plan_decode(params, rows).serves() ? rows : 0;
}

bool decode_kvcache(const KvCacheParams& params, bool skips_longer, cudaStream_t stream) {
    const int64_t rows = max_rows(params);
    if (params.seqlen_q > rows && !skips_longer) return false;
    const DecodePlan plan = plan_decode(params, rows);
    if (!plan.serves()) return false;
    if (params.batch > 0 && params.total_q > 0) plan.kernel.launch(plan.args, stream);
    return true;
}

}  // namespace flash_dmattn::cuda::sm90
