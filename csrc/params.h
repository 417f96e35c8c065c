// What a kernel is given: plain structs that CPU and CUDA runners share. Shapes stand beside every pointer in the
// notation of docs/semantics.md: B batches, H query heads, Hkv key/value heads, Sq query rows, Sk keys, D head dimension.
// Every stride counts elements and is 64 bits wide; a broadcast dimension has stride 0.
#pragma once

#include <cstdint>

namespace flash_dmattn {

enum class DataType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Query-like or key-like rows; D is contiguous. Of variable length: batch_stride is 0 and row 0 is the first row of
// the first sequence.
struct RowsView {
    void* data = nullptr;  // [B, S, heads, D] or [total, heads, D]
    int64_t batch_stride = 0;
    int64_t row_stride = 0;
    int64_t head_stride = 0;
};

// One number a row and head: lse, D_i and their gradients, in the accumulation type.
struct RowStatView {
    void* data = nullptr;  // [B, H, Sq] or [H, total_q]
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
};

// One number a (query row, key) pair: mask, bias and the gradient of the bias.
struct ScoreView {
    // [{B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}]; of variable length [total_k, heads] or [total_q, heads, Sk]
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;           // size of the batch dimension: B, B/n or 1
    int64_t batch_group_size = 1;  // n: so many batch elements, one after the other, share one; of variable length 1
    int64_t heads = 1;             // size of the head dimension: H, Hkv or 1
    bool per_key = false;  // one number a key; of variable length the first dimension then counts keys, not rows

    bool present() const { return data != nullptr; }
    // The query heads [h * H / heads, (h + 1) * H / heads) share head h of this view.
    int64_t head_of(int64_t query_head, int64_t query_heads) const { return query_head / (query_heads / heads); }
    // The batch elements [b * n, (b + 1) * n) share batch b of this view.
    int64_t batch_of(int64_t batch) const { return batches > 1 ? batch / batch_group_size : 0; }
};

enum class BiasKind : int32_t {
    kNone,
    kKey,    // the same for every query row: [.., 1, Sk]
    kDense,  // [.., Sq, Sk]
};

// bool, true = visible.
using MaskView = ScoreView;

struct BiasView : ScoreView {
    BiasKind kind = BiasKind::kNone;
    DataType dtype = DataType::kFloat32;
};

// A mask of intervals: key j may be seen by the query rows [start_j, end_j), counted from the sequence's first row. Ends
// may lie beyond the rows.
struct IntervalView {
    const int32_t* start = nullptr;  // [{B|1}, {H|Hkv|1}, Sk]; of variable length [total_k, heads]
    const int32_t* end = nullptr;    // with start's strides
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;
    int64_t heads = 1;

    bool present() const { return start != nullptr; }
};

// For each tile of query rows the sorted keys that any of its rows sees. List t belongs to batch element
// t / (heads * num_m_blocks), mask head t / num_m_blocks % heads and the rows [tile_rows * (t % num_m_blocks), ...), counted from
// the sequence's first; it is keys[begins[t]] .. keys[ends[t] - 1], counted from the sequence's first key, and ends in -1
// up to a multiple of kAlign. Lists need not be adjacent, and several tiles may have the same. Where `intervals` are given
// too they decide which rows see a key of the list, else `rows` does, else every row of the tile sees it. Causality and
// the bias may hide more. Where lists were not made, since they would not be short, all begins and ends are -1.
struct KeyListsView {
    static constexpr int64_t kRows = 128;  // of a tile, at most
    static constexpr int64_t kAlign = 64;

    const int32_t* keys = nullptr;    // [capacity]
    const int64_t* begins = nullptr;  // [lists], multiples of kAlign
    const int64_t* ends = nullptr;    // [lists], the same
    const uint32_t* rows = nullptr;   // [capacity, kRows / 32]: bit i % 32 of word i / 32 is row i of the tile
    int64_t capacity = 0;
    int64_t batches = 1;           // B, or B/n or 1 where batch elements share lists
    int64_t batch_group_size = 1;  // as in ScoreView
    int64_t heads = 1;             // H, Hkv or 1
    int64_t tile_rows = kRows;     // or kRows / 2
    int64_t num_m_blocks = 1;      // ceil(Sq / tile_rows), or 1 where every row of a head shares one list (a key mask)
    int64_t longest = 0;           // about how long a list may be, by the room that there is, where that is known
    bool row_broadcast = false;    // one list serves every row

    bool present() const { return begins != nullptr; }  // the keys may be none
    int64_t batch_of(int64_t batch) const { return batches > 1 ? batch / batch_group_size : 0; }
};

// What a mask says of a tile.
enum class BlockKind : uint8_t { kEmpty, kMixed, kFull };

// A bool mask as the CUDA kernels read it: packed to bits, and summarized in tiles of 64 rows by 64 keys. Rows, heads
// and batches that the mask broadcasts are stored once. Made by pack_mask_cuda, shared by forward and backward. Tiles
// that causality hides whole are kEmpty whatever the mask says, and their bits are undefined; nor do columns count pairs
// that causality hides.
struct PackedMask {
    static constexpr int64_t kTile = 64;

    // [{B|B/n|1}, heads, {Sq|1}, words]; of variable length [B, heads, 1, words] where rows are alike, else [total_q, heads,
    // words]. Bit j % 32 of word j / 32 is key j of the sequence; `words` is a multiple of 4, and bits beyond the keys
    // are 0.
    uint32_t* bits = nullptr;
    // [{B|B/n|1}, heads, num_m_blocks, num_n_blocks]: bit j is 1 where a row of the tile sees key j of it.
    uint64_t* columns = nullptr;
    BlockKind* kinds = nullptr;     // [{B|B/n|1}, heads, num_m_blocks, num_n_blocks]
    int64_t bits_batch_stride = 0;  // counted in words
    int64_t bits_head_stride = 0;
    int64_t bits_row_stride = 0;  // 0 where every row is alike
    int64_t tiles_batch_stride = 0;
    int64_t tiles_head_stride = 0;
    int64_t tiles_row_stride = 0;  // 0 where every row is alike, else num_n_blocks
    int64_t batches = 1;
    int64_t batch_group_size = 1;  // as in ScoreView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    int64_t num_n_blocks = 0;
    int64_t words = 0;
    int64_t bits_size = 0;  // numbers of elements to allocate
    int64_t tiles_size = 0;

    bool present() const { return bits != nullptr; }
};

// What the rows that see each of 64 keys have in common, as the CUDA kernels of tiles ask it of a mask of intervals:
// causality and lengths count. Of the keys that no row sees, last_begin and first_end say that not all are seen.
struct alignas(16) IntervalBlockSummary {
    static constexpr int64_t kKeys = 64;

    int32_t first_begin, last_begin;  // rows [first_begin, last_end) see some of the keys,
    int32_t first_end, last_end;      // rows [last_begin, first_end) all
    uint64_t seen;                    // bit j is 1 where any row sees key j
};

// Made by summarize_intervals_cuda.
struct IntervalSummaries {
    IntervalBlockSummary* tiles = nullptr;  // [{B|1}, heads, num_n_blocks]; where lengths differ [B, ..]
    int64_t batch_stride = 0;
    int64_t num_n_blocks = 0;
    int64_t size = 0;                          // number of elements to allocate
    uint32_t* tile_count_semaphore = nullptr;  // [1], 0: by it the blocks of one forward share out what they do

    bool present() const { return tiles != nullptr; }
};

// On CUDA a bool mask may be given both packed and as lists, of which the device alone knows whether they were made. Then
// everything is launched twice, to go by the lists and to go by tiles, and what is launched in vain ends at once. There is no
// dense bias then: what serves these alone is never launched in vain.
struct DeviceDispatch {
    const int64_t* begins = nullptr;  // those of the lists; null where there is but one way
    bool by_lists = false;
};

// The problem: everything that forward and backward have in common.
struct AttentionParams {
    int64_t batch = 0;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t seqlen_q = 0;  // the longest, of variable length
    int64_t seqlen_k = 0;
    int64_t total_q = 0;  // rows and keys of all sequences together
    int64_t total_k = 0;
    int64_t head_dim = 0;
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1], or null where every sequence has seqlen_q rows
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]
    // [B], of fixed length: the keys that a sequence has, at most seqlen_k of them. What lies beyond, of a cache that is
    // filled in part, is never read, and causality aligns to their end. Forward alone.
    const int32_t* seqused_k = nullptr;

    DataType dtype = DataType::kFloat32;  // of query, key, value, out and their gradients
    double softmax_scale = 1.0;
    double softcap = 0.0;  // 0: none
    bool is_causal = false;

    RowsView query;  // [B, Sq, H, D]
    RowsView key;    // [B, Sk, Hkv, D]
    RowsView value;  // [B, Sk, Hkv, D]
    RowsView out;    // [B, Sq, H, D]
    RowStatView lse;
    MaskView mask;  // at most one of `mask` and `intervals` is present
    IntervalView intervals;
    KeyListsView lists;  // where present, the keys are gathered by them
    BiasView bias;
    PackedMask packed_mask;                // of CUDA: stands in for `mask`, which then may be absent
    IntervalSummaries interval_summaries;  // of CUDA: of `intervals`, where there are no lists
    DeviceDispatch device_dispatch;        // of CUDA
};

struct FwdParams : AttentionParams {};

struct BwdParams : AttentionParams {
    RowsView dout;      // [B, Sq, H, D]
    RowStatView dlse;   // of CUDA: absent where it is 0
    RowStatView delta;  // D_i = <do_i, o_i> - dlse_i: scratch of the CPU kernels

    RowsView dquery;
    RowsView dkey;
    RowsView dvalue;
    // Absent where no gradient of the bias is asked for. Of a dense bias: the gradient itself, in the bias's shape and
    // dtype, keys contiguous. Of a key bias: column sums in the accumulation type [B, {H|Hkv}, 1, Sk], or of variable
    // length [{H|Hkv}, total_k]; the caller sums what the bias broadcasts beyond that.
    ScoreView dbias;
    bool deterministic = false;
};

}  // namespace flash_dmattn
