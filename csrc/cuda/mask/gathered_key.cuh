// The listed keys of n_blocks, one a producer lane: fetched early, consumed late, to hide the latency of global memory.
#pragma once

#include "key_list.cuh"
#include "cuda/softmax/scores.cuh"

namespace flash_dmattn::cuda {

struct PrefetchedKey {
    int position;  // position in the sequence, or no key
    uint4 rows;
    KeyBiasBits bias;
};

// Where the biases of a list start: the list's own, by entry, or the sequence's, by key. Head: int or QueryHead.
template <typename Head>
__device__ __forceinline__ const char* list_bias_data(const AttentionParams& p, const Sequence& s, const Head& head,
                                                      const KeyList& list) {
    if (p.lists.biases == nullptr) return bias_data(p.bias, score_offset(p.bias, s, head, p.heads));
    const char* const biases = static_cast<const char*>(p.lists.biases);
    return biases + (list.keys - p.lists.keys) * (p.bias.dtype == DataType::kFloat32 ? 4 : 2);
}
// Loads the bias of the key at `position`, which is keys[at] of its list.
__device__ __forceinline__ KeyBiasBits load_list_bias(const AttentionParams& p, const char* biases, int at,
                                                      int position) {
    return load_key_bias(p.bias, biases, p.lists.biases != nullptr ? at : position * p.bias.col_stride);
}

// Reads the keys of one list for some rows of its m_block.
template <typename T, BiasKind kBias>
class ListReader {
public:
    __device__ ListReader(const AttentionParams& p, const Sequence& s, const QueryHead& head, int first_row,
                          const KeyList& list, int rows = KeyListsView::kRows)
        : p_(p), s_(s), list_(list), first_row_(first_row), end_row_(first_row + rows) {
        if (kBias == BiasKind::kKey) bias_ = list_bias_data(p, s, head, list);
    }

    __device__ __forceinline__ PrefetchedKey fetch(int at, int position) const {
        PrefetchedKey key{position, {}, {}};
        if (!is_key(position, s_.keys)) return key;
        key.rows = list_.fetch(at, position);
        if (kBias == BiasKind::kKey) key.bias = load_list_bias(p_, bias_, at, position);
        return key;
    }

    // Writes which rows see the key, and its bias. Returns its position, or -1 if no row sees it; such a key may
    // hold anything.
    __device__ __forceinline__ int resolve(const PrefetchedKey& key, uint32_t (&words)[KeyList::kWords],
                                           float& bias) const {
        VisibleRows visible_rows = list_.visible_rows(key.rows, key.position, s_, p_.is_causal);
        bias = kBias == BiasKind::kKey ? key_bias_of<T>(p_.bias, key.bias) : 0;
        if (!is_key(key.position, s_.keys) || bias == -kInfinity) visible_rows.end = 0;
        visible_rows.end = min(visible_rows.end, end_row_);
        visible_rows.of_tile(first_row_, words);
        const bool is_seen = (words[0] | words[1] | words[2] | words[3]) != 0;
        if (!is_seen) bias = 0;
        return is_seen ? key.position : -1;
    }

private:
    const AttentionParams& p_;
    const Sequence& s_;
    const KeyList& list_;
    const int first_row_, end_row_;
    const char* bias_ = nullptr;
};

// The listed keys of consecutive n_blocks, one a lane: its key is number lane_key of each n_block. Prefetched are the
// position in the sequence, two n_blocks ahead, and by this, one ahead, which rows see the key, and its bias.
template <typename T, BiasKind kBias, int kKeys>
class ListPrefetcher {
public:
    // The n_blocks [first, end) of a list.
    __device__ __forceinline__ ListPrefetcher(const ListReader<T, kBias>& reader, const KeyList& list, int lane_key,
                                              int first, int end)
        : reader_(reader), list_(list), lane_key_(lane_key), n_block_(first), end_(end),
          key_(fetch(first, position_of(first))), next_position_(position_of(first + 1)) {}

    // ListReader::resolve of the lane's key in the current n_block.
    __device__ __forceinline__ int resolve(uint32_t (&words)[KeyList::kWords], float& bias) const {
        return reader_.resolve(key_, words, bias);
    }
    __device__ __forceinline__ void advance() {
        ++n_block_;
        key_ = fetch(n_block_, next_position_);
        next_position_ = position_of(n_block_ + 1);
    }

private:
    __device__ __forceinline__ int position_of(int n_block) const {
        return n_block < end_ ? list_.key(n_block * kKeys + lane_key_) : -1;
    }
    __device__ __forceinline__ PrefetchedKey fetch(int n_block, int position) const {
        return reader_.fetch(n_block * kKeys + lane_key_, position);
    }

    const ListReader<T, kBias>& reader_;
    const KeyList& list_;
    const int lane_key_;
    int n_block_;
    const int end_;
    PrefetchedKey key_;  // of the current n_block
    int next_position_;  // of the next
};

// Row visibility, positions and biases of a gathered n_block, in shared memory.
template <int kKeys>
struct GatheredKeyMetadata {
    // Bit i % 32 of word i / 32: row i of the list sees the key.
    alignas(16) uint32_t rows[kKeys][KeyList::kWords];
    int position[kKeys];  // position in the sequence; -1 if no row sees the key
    float bias[kKeys];    // times log2(e)

    __device__ __forceinline__ void store(int i, int key_position, const uint32_t (&words)[KeyList::kWords],
                                          float key_bias) {
        *reinterpret_cast<uint4*>(rows[i]) = {words[0], words[1], words[2], words[3]};
        position[i] = key_position;
        bias[i] = key_bias * kLog2E;
    }
};

}  // namespace flash_dmattn::cuda
