// The sequences of a selection, one per batch element and head. A position numbers all keys of all sequences, sequence
// by sequence (variable length: head 0, then head 1, ..).
#pragma once

#include "cuda/common/basics.cuh"
#include "topk.h"

namespace flash_dmattn::cuda {

// The problem as a kernel parameter.
struct Sequences {
    int batches, heads;
    int rows, keys;  // Sq and Sk; variable length: keys is total_k
    int window;
    const int32_t* cu_q;  // [batches + 1], variable length
    const int32_t* cu_k;
    int32_t* start;  // [batches, heads, Sk], variable length [total_k, heads]
    int32_t* end;    // the same

    explicit Sequences(const SelectParams& params, int32_t* intervals)
        : batches(static_cast<int>(params.batches)), heads(static_cast<int>(params.bias.heads)),
          rows(static_cast<int>(params.rows)), keys(static_cast<int>(params.keys)),
          window(static_cast<int>(params.window < kNeverEvicted ? params.window : kNeverEvicted)),
          cu_q(params.cu_seqlens_q), cu_k(params.cu_seqlens_k), start(intervals),
          end(intervals == nullptr ? nullptr : intervals + positions(params)) {}

    static int64_t positions(const SelectParams& params) {
        return (params.cu_seqlens_k != nullptr ? 1 : params.batches) * params.bias.heads * params.keys;
    }
    __host__ __device__ bool varlen() const { return cu_k != nullptr; }
    __host__ __device__ int count() const { return batches * heads; }
};

struct OneSequence {
    int batch, head;
    int first_position;
    int first_key;  // variable length: among all keys
    int keys;
    int lead;                       // row 0 stands at this key of the sequence
    int64_t first_out, out_stride;  // of its intervals

    __device__ OneSequence(const Sequences& all, int batch_, int head_) : batch(batch_), head(head_) {
        if (all.varlen()) {
            first_key = all.cu_k[batch];
            keys = all.cu_k[batch + 1] - first_key;
            lead = keys - (all.cu_q[batch + 1] - all.cu_q[batch]);
            first_position = head * all.keys + first_key;
            out_stride = all.heads;
            first_out = first_key * out_stride + head;
        } else {
            first_key = 0;
            keys = all.keys;
            lead = keys - all.rows;
            first_position = (batch * all.heads + head) * keys;
            out_stride = 1;
            first_out = first_position;
        }
    }

    // Writes the interval of a key that the arrival of key `evicted_at` evicts.
    __device__ void write_end(const Sequences& all, int key, int evicted_at) const {
        all.end[first_out + key * out_stride] = evicted_at < keys ? max(evicted_at - lead, 0) : kNeverEvicted;
    }
    __device__ void write_start(const Sequences& all, int key) const {
        all.start[first_out + key * out_stride] = max(key - lead, 0);
    }
    __device__ void write_masked(const Sequences& all, int key) const {
        all.end[first_out + key * out_stride] = max(key - lead, 0);
    }
};

// A key bias of 16 or 32 bits.
struct KeyBias {
    const void* data;
    int64_t batch_stride, head_stride, col_stride;
    bool is_bfloat16;

    KeyBias(const Sequences& all, const BiasView& view)
        : data(view.data), batch_stride(!all.varlen() && view.batches > 1 ? view.batch_stride : 0),
          head_stride(view.head_stride), col_stride(view.col_stride), is_bfloat16(view.dtype == DataType::kBFloat16) {}

    // Bias of the sequence's first key.
    template <typename Bits>
    __device__ const Bits* of(const OneSequence& s) const {
        return static_cast<const Bits*>(data) + s.batch * batch_stride + s.head * head_stride +
               s.first_key * col_stride;
    }
};

// Variable length: the sequence of a key, or `batches` behind the last.
__device__ __forceinline__ int batch_of_key(const Sequences& all, int key) {
    int low = 0, high = all.batches;  // the first whose keys end behind `key`
    while (low < high) {
        const int middle = (low + high) / 2;
        if (all.cu_k[middle + 1] > key) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Flag of a sorted key whose bias masks it; the other bits are its position.
constexpr uint32_t kMasked = 1u << 31;

}  // namespace flash_dmattn::cuda
