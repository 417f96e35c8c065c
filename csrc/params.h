// The problem that a kernel solves, as plain structs that the CPU and the CUDA kernels share, without torch.
//
// Shapes: B batch elements, H query heads, Hkv key/value heads, Sq query rows, Sk keys, D head dimension; of variable
// length [total_q, ..] and [total_k, ..], all sequences concatenated. {H|Hkv|1} is a dimension of one of these sizes.
// Strides count elements, in 64 bits; a broadcast dimension has stride 0. Absent tensors have null pointers.
//
// CUDA kernels take these structs by value: compiled kernels depend on the order and types of the members.
#pragma once

#include <cstdint>

// Functions that kernels call, too.
#ifdef __CUDACC__
#define FLASH_DMATTN_HOST_DEVICE __host__ __device__
#else
#define FLASH_DMATTN_HOST_DEVICE
#endif

namespace flash_dmattn {

enum class DataType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Q, K, V, O and their gradients. D is contiguous.
struct RowsView {
    void* data = nullptr;      // [B, S, heads, D]; with variable length [total, heads, D]
    int64_t batch_stride = 0;  // 0 with variable length
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// One number for each row and query head: lse, its gradient, and D_i. In the accumulation type: float32, on the CPU
// float64 for float64 tensors. Rows are contiguous.
struct RowStatView {
    void* data = nullptr;      // [B, H, Sq]; with variable length [H, total_q]
    int64_t batch_stride = 0;  // 0 with variable length
    int64_t head_stride = 0;
};

// One element for each score, that is, for each query row and key, up to broadcasts: mask, bias and its gradient.
struct ScoreView {
    // [{B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}]; with variable length [total_q, heads, Sk], or [total_k, heads] where
    // per_key
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;           // B, B/n or 1
    int64_t batch_group_size = 1;  // n consecutive batch elements share one of the view; 1 with variable length
    int64_t heads = 1;             // H, Hkv or 1
    bool per_key = false;          // broadcast over rows: one element for each key

    bool present() const { return data != nullptr; }
    // Query heads [h * H / heads, (h + 1) * H / heads) share head h of the view.
    int64_t head_of(int64_t query_head, int64_t query_heads) const { return query_head / (query_heads / heads); }
    // Batch elements [b * n, (b + 1) * n) share batch b of the view.
    int64_t batch_of(int64_t batch) const { return batches > 1 ? batch / batch_group_size : 0; }
};

enum class BiasKind : int32_t {
    kNone,
    kKey,    // [.., 1, Sk], broadcast over rows
    kDense,  // [.., Sq, Sk]
    // Instantiations of CUDA kernels, never in a BiasView: none, beside a relative bias
    kRelative,      // of one dimension
    kRelativeGrid,  // of a grid
};
constexpr FLASH_DMATTN_HOST_DEVICE bool is_relative(BiasKind bias) {
    return bias == BiasKind::kRelative || bias == BiasKind::kRelativeGrid;
}

// bool, true = visible.
using MaskView = ScoreView;

struct BiasView : ScoreView {
    BiasKind kind = BiasKind::kNone;
    DataType dtype = DataType::kFloat32;
};

// A relative position bias: one number for each distance of a key from a row, added to the score after the softcap, or
// masking it where it is -inf or the lowest finite number. In the accumulation type, as RowStatView. Entries are
// contiguous.
//
// One dimension: row i and key j of a sequence of Sq rows and Sk keys read entry R + clamp(j - (i + Sk - Sq), -R, R).
// A grid of h x w tokens, Sq = Sk = h * w: row i = y_i * w + x_i and key j read entry
// (y_i - y_j + h - 1) * (2 w - 1) + (x_i - x_j + w - 1), which is base(i) - offset(j) with
// base(i) = (y_i + h - 1) * (2 w - 1) + x_i + w - 1 and offset(j) = y_j * (2 w - 1) + x_j.
// A matrix, on CUDA only: a dense attn_bias in float32 beside 16-bit queries. Row i and key j read entry i * Sk + j.
struct RelativeBiasView {
    const void* data = nullptr;  // [{B|1}, {H|Hkv|1}, size]
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t batches = 1;           // B or 1
    int64_t heads = 1;             // H, Hkv or 1
    int64_t radius = 0;            // R; one dimension: size is 2 R + 1
    int64_t grid_height = 0;       // h; 0: one dimension. Matrix: Sq
    int64_t grid_width = 0;        // w; size is (2 h - 1) * (2 w - 1). Matrix: Sk
    int64_t batch_group_size = 0;  // matrix: as in ScoreView; 0: not a matrix
    // CUDA only: 2^40 / w, rounded up. A position divided by w is its product with this, shifted by 40 bits, exactly
    // while h * w * w < 2^40.
    uint64_t inverse_grid_width = 0;

    bool present() const { return data != nullptr; }
    bool has_grid() const { return grid_height > 0; }  // or is a matrix
    bool is_matrix() const { return batch_group_size > 0; }
    int64_t size() const {
        if (is_matrix()) return grid_height * grid_width;
        return has_grid() ? (2 * grid_height - 1) * (2 * grid_width - 1) : 2 * radius + 1;
    }
    int64_t head_of(int64_t query_head, int64_t query_heads) const { return query_head / (query_heads / heads); }
    int64_t batch_of(int64_t batch) const { return batches > 1 ? batch : 0; }
};

// An interval mask. The key interval of key j: query rows [start_j, end_j), counted from the sequence's first row, see
// the key. An end may lie beyond the last row.
struct IntervalView {
    const int32_t* start = nullptr;  // [{B|1}, {H|Hkv|1}, Sk]; with variable length [total_k, heads]
    const int32_t* end = nullptr;    // the same shape and strides
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;
    int64_t heads = 1;

    bool present() const { return start != nullptr; }
};

// Key lists: for each m_block the keys that its rows may see, for kernels that gather keys.
//
// List t belongs to batch element t / (heads * num_m_blocks), mask head t / num_m_blocks % heads and m_block
// t % num_m_blocks, which has the rows [m_block * m_block_rows, (m_block + 1) * m_block_rows) of its sequence. Its keys
// are keys[begins[t]] .. keys[ends[t] - 1], counted from the sequence's first key, padded with -1 to a multiple of kAlign.
// Lists need not be adjacent; m_blocks may share one. They ascend on the CPU, for deterministic gradients, and where all
// rows of a head share one list; else in any order. Lists of rows of a KV cache (cuda/kvcache/prefill_lists.h) come
// without causality.
//
// A row sees a key of its list if `intervals` of the problem show it; without intervals, if its bit in `rows` is set;
// without both, always. Causality and the bias may mask more.
//
// A CUDA builder that finds the lists too long leaves all begins and ends at -1 (see DeviceDispatch).
struct KeyListsView {
    static constexpr int64_t kRows = 128;  // most rows of an m_block
    static constexpr int64_t kAlign = 64;

    const int32_t* keys = nullptr;    // [capacity]
    const int64_t* begins = nullptr;  // [batches, heads, num_m_blocks], multiples of kAlign
    const int64_t* ends = nullptr;    // [batches, heads, num_m_blocks], multiples of kAlign
    // [capacity, kRows / 32]. Bit i % 32 of word i / 32: row i of the m_block sees the key.
    const uint32_t* rows = nullptr;
    const void* biases = nullptr;  // [capacity]: of the listed keys, in bias.dtype, instead of bias.data; null: in it
    int64_t capacity = 0;
    int64_t batches = 1;           // B, B/n or 1
    int64_t batch_group_size = 1;  // as in ScoreView
    int64_t heads = 1;             // H, Hkv or 1
    int64_t m_block_rows = kRows;  // kRows or kRows / 2
    int64_t num_m_blocks = 1;      // ceil(Sq / m_block_rows), or 1 where all rows of a head share one list
    int64_t estimated_length = 0;  // the average capacity of a list; 0: unknown

    // The length of a list with its padding.
    static FLASH_DMATTN_HOST_DEVICE int64_t padded(int64_t length) { return (length + kAlign - 1) / kAlign * kAlign; }
    bool present() const { return begins != nullptr; }  // `keys` may be empty
    int64_t batch_of(int64_t batch) const { return batches > 1 ? batch / batch_group_size : 0; }
};

// A bool mask as the CUDA kernels read it: packed to bits, with a block summary for every 64 rows (m_block) by 64 keys
// (n_block). A block summary has the block's visible keys and whether the mask shows all its scores: a kernel skips the
// block, tests its scores, or need not test them. Broadcast rows, heads and batch elements are stored once. pack_mask_cuda
// makes it; forward and backward share it.
//
// Blocks that causality masks entirely have no visible keys, and their bits are undefined. `visible_keys` has no keys that
// causality masks for all rows of a block.
struct PackedMask {
    static constexpr int64_t kBlock = 64;                           // rows and keys of a block
    static constexpr int64_t kSummaryBytes = sizeof(uint64_t) + 1;  // of a block: its visible keys and is_full

    // [{B|B/n|1}, heads, {Sq|1}, words]; with variable length [B, heads, 1, words] where row_broadcast, else
    // [total_q, heads, words]. Bit j % 32 of word j / 32 is key j of the sequence. Bits beyond the last key are 0.
    uint32_t* bits = nullptr;
    // The visible keys: [batches, heads, num_m_blocks, num_n_blocks]. Bit j: some row of the block sees its key j.
    uint64_t* visible_keys = nullptr;
    bool* is_full = nullptr;        // [batches, heads, num_m_blocks, num_n_blocks]: all scores of the block are visible
    int64_t bits_batch_stride = 0;  // in words
    int64_t bits_head_stride = 0;
    int64_t bits_row_stride = 0;      // 0: broadcast over rows
    int64_t blocks_batch_stride = 0;  // of visible_keys and is_full
    int64_t blocks_head_stride = 0;
    int64_t blocks_row_stride = 0;  // from m_block to m_block; 0: broadcast over rows
    int64_t batches = 1;            // B, B/n or 1
    int64_t batch_group_size = 1;   // as in ScoreView
    int64_t heads = 1;              // H, Hkv or 1
    int64_t num_m_blocks = 1;
    int64_t num_n_blocks = 0;
    int64_t words = 0;        // of a row, a multiple of 4
    int64_t bits_size = 0;    // elements of bits
    int64_t blocks_size = 0;  // elements of visible_keys, and of is_full

    FLASH_DMATTN_HOST_DEVICE bool present() const { return bits != nullptr; }
    FLASH_DMATTN_HOST_DEVICE bool row_broadcast() const { return bits_row_stride == 0; }
};

// The block summary of an interval mask: bounds of the key intervals of 64 keys (an n_block), with causality and
// lengths. An n_block is empty for an m_block outside [first_begin, last_end), and full for one inside [last_begin,
// first_end).
struct alignas(16) IntervalBlockSummary {
    static constexpr int64_t kKeys = 64;

    // Rows. A key that no row sees makes [last_begin, first_end) empty.
    int32_t first_begin, last_begin;
    int32_t first_end, last_end;
    uint64_t visible_keys;  // bit j: some row sees key j
};

// Block summaries of an interval mask. summarize_intervals_cuda makes them.
struct IntervalSummaries {
    IntervalBlockSummary* blocks = nullptr;  // [{B|1}, heads, num_n_blocks]; B where lengths differ
    int64_t batch_stride = 0;
    int64_t num_n_blocks = 0;
    int64_t size = 0;  // elements of blocks

    FLASH_DMATTN_HOST_DEVICE bool present() const { return blocks != nullptr; }
};

// Device-side dispatch. For a bool mask that may be sparse, CUDA packs the mask and builds key lists, and only the
// device knows whether the lists are short enough to be used. Then each kernel is launched twice, for lists and for
// dense blocks, and the launch that was not selected returns immediately. Kernels that serve only a dense bias are
// never launched so.
struct DeviceDispatch {
    const int64_t* begins = nullptr;  // KeyListsView::begins: begins[0] < 0 where lists are not used; null: no dispatch
    bool by_lists = false;            // whether this launch is the one for lists
};

// What forward and backward have in common.
struct AttentionParams {
    int64_t batch = 0;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t seqlen_q = 0;  // Sq; with variable length the maximum
    int64_t seqlen_k = 0;  // Sk; with variable length the maximum
    int64_t total_q = 0;   // rows of all sequences
    int64_t total_k = 0;   // keys of all sequences
    int64_t head_dim = 0;
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1]; null with fixed length
    // [B + 1]; null with fixed length, and where key lists of all sequences name rows of one cache of seqlen_k rows
    const int32_t* cu_seqlens_k = nullptr;
    int64_t skipped_rows = 0;  // forward only, variable length: sequences of at most so many rows are left out
    // [B], forward only, with fixed length: the keys of each sequence in a partly filled cache, clamped to [0,
    // seqlen_k]. Keys beyond may hold anything, and causality aligns to the last used key.
    const int32_t* seqused_k = nullptr;

    DataType dtype = DataType::kFloat32;  // of Q, K, V, O and their gradients
    double softmax_scale = 1.0;
    double softcap = 0.0;  // 0: none
    bool is_causal = false;

    RowsView query;  // [B, Sq, H, D]
    RowsView key;    // [B, Sk, Hkv, D]
    RowsView value;  // [B, Sk, Hkv, D]
    RowsView out;    // [B, Sq, H, D]
    RowStatView lse;
    MaskView mask;           // at most one of `mask` and `intervals` is present
    IntervalView intervals;  // at most one of `mask` and `intervals` is present
    KeyListsView lists;      // present: kernels gather keys
    BiasView bias;
    // CUDA only:
    PackedMask packed_mask;                // replaces `mask`, which may be absent
    IntervalSummaries interval_summaries;  // of `intervals`, without lists
    DeviceDispatch device_dispatch;

    RelativeBiasView relative_bias;
};

struct FwdParams : AttentionParams {
    int32_t* tile_count_semaphore = nullptr;  // [1], zeroed: the counter of a dynamic tile scheduler; null: static
};

struct BwdParams : AttentionParams {
    RowsView dout;      // [B, Sq, H, D]
    RowStatView dlse;   // on CUDA absent where it is 0
    RowStatView delta;  // D_i = <do_i, o_i> - dlse_i: scratch memory

    RowsView dquery;  // [B, Sq, H, D]
    RowsView dkey;    // [B, Sk, Hkv, D]
    RowsView dvalue;  // [B, Sk, Hkv, D]
    // Absent where the bias needs no gradient. Dense bias: the gradient in the bias's shape and dtype, keys
    // contiguous. Key bias: column sums in the accumulation type, [B, {H|Hkv}, 1, Sk] or, with variable length,
    // [{H|Hkv}, total_k]; the caller sums over further broadcast dimensions.
    ScoreView dbias;
    bool deterministic = false;
    // [batches, heads, size] of relative_bias, contiguous, in the accumulation type, zeroed by the caller: kernels add
    // to it. Null where relative_bias needs no gradient.
    void* drelative_bias = nullptr;
};

}  // namespace flash_dmattn
