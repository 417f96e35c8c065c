// From params to the instantiation of their head dimension and dtype, and the scratch memory that it needs.
#include "bwd.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../attention.h"
#include "../bwd_preprocess.h"
#include "../common/check.h"
#include "bwd_kernel.cuh"
#include "kernels.h"  // generated: FLASH_DMATTN_FOR_EACH_BWD(X), X(T, head dimension) for what is built
#include "serves.cuh"

namespace flash_dmattn {
namespace cuda {

// It tells for which architecture the code that was loaded was compiled: not always the device's own.
namespace {
__global__ void probe_kernel() {}
}  // namespace

bool uses_small_tiles() {
    cudaFuncAttributes attributes;
    FLASH_CUDA_CHECK(cudaFuncGetAttributes(&attributes, probe_kernel));
    return has_little_shared_memory(attributes.ptxVersion * 10);
}

namespace {

// The head dimension of the instantiation that serves p; 0 where none was built.
int built_head_dim(const AttentionParams& p) {
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (serves<T, kHeadDim>(p)) return kHeadDim;
    FLASH_DMATTN_FOR_EACH_BWD(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    return 0;
}

// Into how many parts, of up to `most`, each of the dbias tiles is split, so that the blocks fill a few waves of
// `slots` as well as they can.
int64_t splits_that_fill_waves(int64_t tiles, int64_t slots, int64_t most) {
    int64_t best = 1;
    double best_filled = 0;
    for (int64_t waves = 2; waves <= 4; ++waves) {
        const int64_t splits = std::max<int64_t>(std::min(waves * slots / tiles, most), 1);
        const double filled = static_cast<double>(splits * tiles) / (ceil_div(splits * tiles, slots) * slots);
        if (filled > best_filled + 0.01) {
            best = splits;
            best_filled = filled;
        }
    }
    return best;
}

int64_t count_dbias_tiles(const BwdParams& p, const BwdTileSizes& tile) {
    const int64_t tiles = ceil_div<int64_t>(p.seqlen_q, tile.rows) * ceil_div<int64_t>(p.seqlen_k, tile.keys);
    return tiles * p.dbias.heads * (p.cu_seqlens_q == nullptr ? p.dbias.batches : p.batch);
}

// How the gradient of a shared bias is cut: long runs of tiles, but enough of them for every multiprocessor; where there
// are too few tiles for that, their sharers are split.
void plan_dbias_kernel(BwdParams& p, const BwdTileSizes& tile) {
    constexpr int64_t kWaves = 2, kLongestRun = 16;
    p.dbias_tiles = count_dbias_tiles(p, tile);
    if (p.dbias_tiles == 0) return;
    const int64_t batches = p.cu_seqlens_q == nullptr ? p.batch / p.dbias.batches : 1;
    const int64_t sharers = batches * (p.heads / p.dbias.heads);
    const int64_t slots = device_attribute(cudaDevAttrMultiProcessorCount) * tile.blocks_per_sm;
    if (p.dbias_tiles < kWaves * slots) p.dbias_splits = splits_that_fill_waves(p.dbias_tiles, slots, sharers);
    const int64_t key_tiles = ceil_div<int64_t>(p.seqlen_k, tile.keys);
    p.dbias_run = std::clamp<int64_t>(p.dbias_tiles / (kWaves * slots), 1, std::min(kLongestRun, key_tiles));
}

template <typename Tile>
bool can_exchange_dx_among(int64_t batch) {
    return kCanExchangeDx<Tile> && DxExchange<Tile>::can_divide(batch);
}
// Whether the blocks of the main kernel can exchange dx, one for each of the batch elements that share a bias.
bool can_exchange_dx(const BwdParams& p) {
    const bool batch_shares = p.dbias.heads == p.heads && p.dbias.batches == 1 && p.cu_seqlens_q == nullptr;
    if (!batch_shares || uses_small_tiles()) return false;  // code with the large tiles has clusters, too
#define FLASH_DMATTN_MATCH(T, kHeadDim) \
    if (serves<T, kHeadDim>(p)) return can_exchange_dx_among<BwdTile<kHeadDim, T, false>>(p.batch);
    FLASH_DMATTN_FOR_EACH_BWD(FLASH_DMATTN_MATCH)
#undef FLASH_DMATTN_MATCH
    return false;
}

// Who writes the gradient of a dense bias, and how many floats of scratch memory that takes.
int64_t plan_dense_dbias(BwdParams& p, int head_dim, const BwdTileSizes& main_tile) {
    if (dbias_is_of_one(p)) {
        p.dense_dbias = DenseDbias::kByEntry;
        return 0;
    }
    // The main kernel can hand on dx where it is ds, too, and where the order of its additions is free.
    if (p.softcap == 0 && !p.deterministic) {
        if (can_exchange_dx(p)) {
            p.dense_dbias = DenseDbias::kExchanged;
            return 0;
        }
        // Atomic additions cost little as long as the cache holds the sums.
        p.dbias_tiles = count_dbias_tiles(p, main_tile);
        const int64_t sums = p.dbias_tiles * main_tile.rows * main_tile.keys;
        if (sums * static_cast<int64_t>(sizeof(float)) <= device_attribute(cudaDevAttrL2CacheSize) / 2) {
            p.dense_dbias = DenseDbias::kAtomic;
            p.dbias_splits = p.dbias_run = 1;
            return sums;
        }
    }
    const BwdTileSizes tile = dbias_tile_sizes(head_dim);
    p.dense_dbias = DenseDbias::kOwnKernel;
    plan_dbias_kernel(p, tile);
    return p.dbias_splits > 1 ? p.dbias_splits * p.dbias_tiles * tile.rows * tile.keys : 0;
}

BwdScratch plan_gather_scratch(BwdParams& p, int head_dim, int64_t total_q, int64_t total_k) {
    BwdScratch scratch;
    const bool is_varlen = p.cu_seqlens_q != nullptr;
    p.dkv_rows = is_varlen ? total_k : p.batch * p.seqlen_k;
    p.dkv_cols = head_dim;
    scratch.dkv_accum = 2 * p.dkv_rows * p.kv_heads * p.dkv_cols;
    if (p.bias.kind == BiasKind::kDense && p.dbias.present() && !dbias_is_of_one(p))
        p.dbias_accum_size = (is_varlen ? total_q : p.dbias.batches * p.seqlen_q) * p.dbias.heads * p.seqlen_k;
    scratch.dbias_accum = p.dbias_accum_size;
    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, gather_tile_sizes(head_dim, uses_small_tiles()).rows);
    scratch.watermarks = p.deterministic ? p.batch * p.heads * row_tiles + 1 : 0;
    return scratch;
}

}  // namespace
}  // namespace cuda

BwdScratch plan_bwd_scratch(BwdParams& p, int64_t total_q, int64_t total_k) {
    using namespace cuda;
    BwdScratch scratch;
    const int head_dim = built_head_dim(p);
    if (head_dim == 0) return scratch;
    if (p.lists.present()) return plan_gather_scratch(p, head_dim, total_q, total_k);
    const BwdTileSizes sizes = bwd_tile_sizes(head_dim, uses_small_tiles());
    p.dquery_tiles =
        p.cu_seqlens_q == nullptr ? ceil_div<int64_t>(p.seqlen_q, sizes.rows) : total_q / sizes.rows + p.batch;
    const int64_t tiles = dquery_tiles_total(p);
    scratch.dquery_accum = tiles * sizes.rows * head_dim;
    scratch.dquery_turns = p.deterministic ? tiles + 1 : 0;
    if (p.bias.kind == BiasKind::kDense && p.dbias.present())
        scratch.dbias_parts = plan_dense_dbias(p, head_dim, sizes);
    return scratch;
}

void mha_bwd_cuda(const BwdParams& p, cudaStream_t stream) {
    using namespace cuda;
    if (p.batch == 0 || p.heads == 0) return;
    if (built_head_dim(p) == 0)
        throw std::runtime_error("no backward kernel was built for this dtype and head dimension " +
                                 std::to_string(p.head_dim) + ": see FLASH_DMATTN_DTYPES and FLASH_DMATTN_HEAD_DIMS");
    preprocess_bwd(p, stream);
#define FLASH_DMATTN_RUN(T, kHeadDim) \
    if (serves<T, kHeadDim>(p))       \
        return p.lists.present() ? run_gather_bwd<T, kHeadDim>(p, stream) : run_bwd<T, kHeadDim>(p, stream);
    FLASH_DMATTN_FOR_EACH_BWD(FLASH_DMATTN_RUN)
#undef FLASH_DMATTN_RUN
}

}  // namespace flash_dmattn
