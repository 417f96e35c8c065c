// Top-k intervals of long sequences. The keys of all sequences are sorted ascending, partitioned into chunks of
// eviction times, and one CTA finds the times of a chunk (eviction_order.cuh). Shorter sequences have files of their
// own.
//
// A node is a range of eviction times. Two launches partition its keys into up to 32 children at once: a key goes to
// the first child by whose end it has arrived and which the keys before it in order have not filled, so the number of
// earlier keys per arrival child decides.
#include <algorithm>
#include <utility>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/check.h"
#include "cuda/common/launch.h"
#include "chunked_sequences.h"
#include "eviction_order.cuh"
#include "order.cuh"
#include "short_sequences.h"
#include "sort.h"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kWords = 8;  // words of 32 keys per warp
using ChunkOrder = EvictionOrder<kThreads, kWords>;
constexpr int kChunk = ChunkOrder::kTimes;
constexpr int kChildBits = 5, kChildren = 1 << kChildBits;
static_assert(kChildren == 32, "one a lane");
constexpr int64_t kMaxPositions = 1 << 30;

int bits_for(int64_t values) {  // 0 .. values - 1
    int bits = 0;
    while (int64_t{1} << bits < values) ++bits;
    return bits;
}

// Numbers the chunks of all sequences consecutively. With variable length, a sequence b that starts after x keys has
// chunks from x / kChunk + b on, so some numbers have no chunk.
int64_t chunks_of(const Sequences& all) {
    if (!all.varlen()) return static_cast<int64_t>(all.count()) * ceil_div(all.keys, kChunk);
    return static_cast<int64_t>(all.heads) * (all.keys / kChunk + all.batches);
}

__device__ int first_number(const Sequences& all, int batch) { return all.cu_k[batch] / kChunk + batch; }

struct ChunkIndex {
    int batch, head, in_sequence;

    __device__ ChunkIndex(const Sequences& all, int number) {
        if (all.varlen()) {
            const int of_head = all.keys / kChunk + all.batches;
            head = number / of_head;
            number %= of_head;
            int low = 0, high = all.batches - 1;  // the last sequence that starts at or before the number
            while (low < high) {
                const int middle = (low + high + 1) / 2;
                if (first_number(all, middle) <= number) {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            batch = low;
            in_sequence = number - first_number(all, batch);
        } else {
            const int of_sequence = ceil_div(all.keys, kChunk);
            in_sequence = number % of_sequence;
            head = number / of_sequence % all.heads;
            batch = number / of_sequence / all.heads;
        }
    }
};

// A CTA's chunk and its warps' keys.
struct Chunk {
    const ChunkIndex position;
    const OneSequence sequence;
    const int first;  // eviction time
    const int times;  // number of times; 0 or less: no such chunk

    __device__ explicit Chunk(const Sequences& all)
        : position(all, blockIdx.x), sequence(all, position.batch, position.head), first(position.in_sequence * kChunk),
          times(min(sequence.keys - first, kChunk)) {}

    // Calls visit(w, at) for each word of the warp.
    template <typename Visit>
    __device__ static void for_each(const Visit& visit) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) visit(w, (warp_id() * kWords + w) * 32 + lane_id());
    }
};

// The sort's input: positions, and ranks with the sequence number above them. If there is no room above, there is one
// sequence, or 64-bit ranks are sorted by rank first.
template <DataType kType, typename Key>
__global__ void __launch_bounds__(kThreads)
    make_keys_kernel(const __grid_constant__ Sequences all, const __grid_constant__ BiasView bias, int64_t positions,
                     Key* keys, uint32_t* values) {
    grid_dependency_sync();
    using Bits = typename FloatBits<kType>::Bits;
    const int64_t position = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (position >= positions) return;
    int key = static_cast<int>(position % all.keys);
    const int above = static_cast<int>(position / all.keys);
    int head = above % all.heads, batch = above / all.heads;
    int64_t at = key * bias.col_stride + head * bias.head_stride;
    if (all.varlen()) {
        batch = batch_of_key(all, key);
    } else if (bias.batches > 1) {
        at += batch * bias.batch_stride;
    }
    uint32_t value = static_cast<uint32_t>(position);
    Bits rank = 0;
    if (batch < all.batches) {
        const OneSequence s(all, batch, head);
        key -= s.first_key;
        s.write_start(all, key);
        const Bits bits = static_cast<const Bits*>(bias.data)[at];
        refuse_nan(is_nan<kType>(bits));
        rank = rank_of_bias<kType>(bits);
        if (rank == 0) {
            value |= kMasked;
            s.write_masked(all, key);
        } else if (values == nullptr) {  // every key is visible from its row on, or never
            s.write_end(all, key, all.window == 0 ? key : kNeverEvicted);
        }
    } else {
        all.start[static_cast<int64_t>(key) * all.heads + head] = 0;
        all.end[static_cast<int64_t>(key) * all.heads + head] = 0;
    }
    if (values == nullptr) return;
    Key sequence = 0;
    if constexpr (sizeof(Bits) < sizeof(Key))
        sequence = static_cast<Key>(all.varlen() ? head * (all.batches + 1) + batch : above) << (sizeof(Bits) * 8);
    keys[position] = sequence | rank;
    values[position] = value;
}

// Sequence numbers of positions that are sorted by rank: the keys of the second sort.
__global__ void __launch_bounds__(kThreads)
    number_sequences_kernel(const __grid_constant__ Sequences all, int64_t positions, const uint32_t* values,
                            uint32_t* keys) {
    grid_dependency_sync();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= positions) return;
    const int position = static_cast<int>(values[i] & ~kMasked), above = position / all.keys;
    keys[i] = all.varlen() ? above * (all.batches + 1) + batch_of_key(all, position % all.keys) : above;
}

// One partition round: nodes of 1 << node_bits times into children of 1 << child_bits.
struct Round {
    int node_bits, child_bits;
    const uint32_t* from;
    uint32_t* to;
    int32_t* counts;  // [chunks, kChildren]: keys of the chunk by arrival child
};

// The child of the node in which a key arrives.
__device__ int arrival_child(const Sequences& all, const Chunk& chunk, const Round& round, uint32_t value) {
    const int key = static_cast<int>(value & ~kMasked) - chunk.sequence.first_position;
    const int node = chunk.first >> round.node_bits << round.node_bits;
    return max(key - all.window - node, 0) >> round.child_bits;
}

// counts[warp][child]
__device__ void count_by_warps(const Sequences& all, const Chunk& chunk, const Round& round,
                               int (&counts)[kWarps][kChildren], uint32_t (&value)[kWords], int (&child)[kWords]) {
    counts[warp_id()][lane_id()] = 0;
    __syncwarp();
    const uint32_t* from = round.from + chunk.sequence.first_position + chunk.first;
    Chunk::for_each([&](int w, int at) { value[w] = at < chunk.times ? from[at] : 0; });
    Chunk::for_each([&](int w, int at) {
        child[w] = at < chunk.times ? arrival_child(all, chunk, round, value[w]) : kChildren;
        if (at < chunk.times) atomicAdd(&counts[warp_id()][child[w]], 1);
    });
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads)
    count_arrivals_kernel(const __grid_constant__ Sequences all, const __grid_constant__ Round round) {
    grid_dependency_sync();
    __shared__ int counts[kWarps][kChildren];
    const Chunk chunk(all);
    if (chunk.times <= 0) return;
    uint32_t value[kWords];
    int child[kWords];
    count_by_warps(all, chunk, round, counts, value, child);
    if (warp_id() != 0) return;
    int sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp][lane_id()];
    round.counts[static_cast<int64_t>(blockIdx.x) * kChildren + lane_id()] = sum;
}

// The lanes of each child, as one ballot per bit of the child.
class LanesByChild {
public:
    struct Masks {
        uint32_t below, equal;
    };

    __device__ LanesByChild(int child, bool exists) : exists_(__ballot_sync(~0u, exists)) {
#pragma unroll
        for (int bit = 0; bit < kChildBits; ++bit) ballots_[bit] = __ballot_sync(~0u, child >> bit & 1);
    }

    // The lanes whose child is at most this one. Lanes may pass different children.
    __device__ Masks upto(int child) const {
        Masks masks{0, exists_};
#pragma unroll
        for (int bit = kChildBits - 1; bit >= 0; --bit) {
            const bool one = child >> bit & 1;
            if (one) masks.below |= masks.equal & ~ballots_[bit];
            masks.equal &= one ? ballots_[bit] : ~ballots_[bit];
        }
        return masks;
    }

private:
    uint32_t exists_, ballots_[kChildBits];
};

// A key goes to the first child that has not ended when the key arrives and that the keys before it have not filled.
__global__ void __launch_bounds__(kThreads)
    partition_kernel(const __grid_constant__ Sequences all, const __grid_constant__ Round round) {
    grid_dependency_sync();
    __shared__ int counts[kWarps][kChildren];
    __shared__ int before_chunk[kWarps][kChildren];  // a partial sum per warp
    const Chunk chunk(all);
    if (chunk.times <= 0) return;
    uint32_t value[kWords];
    int child[kWords];
    const int node = chunk.first >> round.node_bits << round.node_bits;
    const int chunks_before = (chunk.first - node) / kChunk;
    int sum = 0;
    for (int i = 1 + warp_id(); i <= chunks_before; i += kWarps)
        sum += round.counts[static_cast<int64_t>(blockIdx.x - i) * kChildren + lane_id()];
    before_chunk[warp_id()][lane_id()] = sum;
    count_by_warps(all, chunk, round, counts, value, child);

    // Lane i: number of earlier keys that arrive in child i; then, in children up to i.
    int arrived = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        arrived += before_chunk[warp][lane_id()];
        if (warp < warp_id()) arrived += counts[warp][lane_id()];
    }
    arrived = warp_inclusive_sum(arrived);

    const int size = 1 << round.child_bits;
    uint32_t* to = round.to + chunk.sequence.first_position + node;
    Chunk::for_each([&](int w, int at) {
        const bool exists = at < chunk.times;
        const LanesByChild lanes(child[w], exists);
        const uint32_t open =
            __ballot_sync(~0u, arrived < (lane_id() + 1) * size);  // not yet filled; the last never is
        const auto next_open = [&](int c) { return __ffs(open & (~0u << c)) - 1; };
        int position = -1, c = exists ? next_open(child[w]) : 0;
        while (__any_sync(~0u, exists && position < 0)) {
            const LanesByChild::Masks masks = lanes.upto(c);
            const int before = __shfl_sync(~0u, arrived, c) + rank_in(masks.below | masks.equal);
            const int gone = min(__shfl_sync(~0u, arrived, max(c - 1, 0)) + rank_in(masks.below), c * size);
            if (!exists || position >= 0) continue;
            if (before < (c + 1) * size) {
                position = c * size + before - gone;
            } else {
                c = next_open(c + 1);
            }
        }
        const LanesByChild::Masks masks = lanes.upto(lane_id());
        arrived += __popc(masks.below | masks.equal);
        if (exists) to[position] = value[w];
    });
}

__global__ void __launch_bounds__(kThreads, 2)
    eviction_kernel(const __grid_constant__ Sequences all, const uint32_t* values) {
    grid_dependency_sync();
    __shared__ typename ChunkOrder::SharedStorage smem;
    const Chunk chunk(all);
    if (chunk.times <= 0) return;
    const uint32_t* from = values + chunk.sequence.first_position + chunk.first;
    Chunk::for_each([&](int, int at) {
        if (at < chunk.times) smem.keys[at] = from[at] - chunk.sequence.first_position;
    });
    __syncwarp();
    ChunkOrder(smem, chunk.times, chunk.first, all.window).run([&](uint32_t key, int time) {
        if (!(key & kMasked)) chunk.sequence.write_end(all, key, all.window + time);
    });
}

unsigned blocks_of(int64_t positions) { return grid_of(ceil_div<int64_t>(positions, kThreads)); }

template <typename Key>
void make_keys(const Sequences& all, const BiasView& bias, int64_t positions, Key* keys, uint32_t* values,
               cudaStream_t stream) {
    const auto run = [&](auto kernel) {
        launch(kernel, {blocks_of(positions), kThreads}, stream, all, bias, positions, keys, values);
    };
    if constexpr (sizeof(Key) == 8) {
        if (bias.dtype == DataType::kFloat64) return run(make_keys_kernel<DataType::kFloat64, Key>);
    }
    if (bias.dtype == DataType::kFloat32) return run(make_keys_kernel<DataType::kFloat32, Key>);
    if (bias.dtype == DataType::kBFloat16) return run(make_keys_kernel<DataType::kBFloat16, Key>);
    run(make_keys_kernel<DataType::kFloat16, Key>);
}

int bits_of_rank(DataType dtype) { return dtype == DataType::kFloat64 ? 64 : dtype == DataType::kFloat32 ? 32 : 16; }
int64_t sequences_of(const Sequences& all) {  // with variable length, one more per head
    return static_cast<int64_t>(all.heads) * (all.varlen() ? all.batches + 1 : all.batches);
}

// Width of the sort keys.
bool sorts_64_bits(const Sequences& all, DataType dtype) {
    return bits_of_rank(dtype) + bits_for(sequences_of(all)) > 32;
}

// Sorts the positions ascending within each sequence.
template <typename Key>
DoubleBuffer<uint32_t> sort_positions(const Sequences& all, const BiasView& bias, int64_t positions,
                                      const IntervalSelectPlan& plan, void* workspace, cudaStream_t stream) {
    DoubleBuffer<Key> keys{plan.sort_keys[0].in<Key>(workspace), plan.sort_keys[1].in<Key>(workspace)};
    DoubleBuffer<uint32_t> values{plan.sort_values[0].in<uint32_t>(workspace),
                                  plan.sort_values[1].in<uint32_t>(workspace)};
    void* const memory = plan.sort_memory.in<void>(workspace);
    make_keys(all, bias, positions, keys.current, values.current, stream);
    const int rank_bits = bits_of_rank(bias.dtype), sequence_bits = bits_for(sequences_of(all));
    const bool apart = rank_bits == 64;
    sort_pairs(memory, plan.sort_memory.bytes, keys, values, positions, rank_bits + (apart ? 0 : sequence_bits),
               stream);
    if (apart && sequence_bits > 0) {
        DoubleBuffer<uint32_t> sequences{reinterpret_cast<uint32_t*>(keys.current),
                                         reinterpret_cast<uint32_t*>(keys.other)};
        launch(number_sequences_kernel, {blocks_of(positions), kThreads}, stream, all, positions, values.current,
               sequences.current);
        sort_pairs(memory, plan.sort_memory.bytes, sequences, values, positions, sequence_bits, stream);
    }
    return values;
}

// Whether no key is ever evicted, or every key at once.
bool is_trivial(const SelectParams& params, int64_t max_keys) {
    return params.window == 0 || params.window >= max_keys;
}

int64_t max_keys_of(const SelectParams& params) {
    return params.cu_seqlens_k == nullptr ? params.keys : std::min(params.max_keys, params.keys);
}

}  // namespace
}  // namespace cuda

IntervalSelectPlan plan_select_intervals(const SelectParams& params) {
    using namespace cuda;
    IntervalSelectPlan plan;
    const Sequences all(params, nullptr);
    const int64_t positions = Sequences::positions(params), max_keys = max_keys_of(params);
    if (positions > kMaxPositions)
        throw std::runtime_error("intervals are selected among up to 2^30 keys of all batch elements and heads, got " +
                                 std::to_string(positions));
    plan.by_chunks = suits_chunks(params);
    if (plan.by_chunks) return plan;
    plan.one_launch = max_keys <= kShortSequence && params.bias.dtype != DataType::kFloat64;
    if (plan.one_launch || positions == 0 || is_trivial(params, max_keys)) return plan;
    const bool wide = sorts_64_bits(all, params.bias.dtype);
    int64_t sort_bytes = wide ? sort_memory_bytes_64(positions) : sort_memory_bytes_32(positions);
    if (params.bias.dtype == DataType::kFloat64) sort_bytes = std::max(sort_bytes, sort_memory_bytes_32(positions));
    for (WorkspaceBuffer& keys : plan.sort_keys)
        keys = wide ? plan.allocate<uint64_t>(positions) : plan.allocate<uint32_t>(positions);
    for (WorkspaceBuffer& values : plan.sort_values) values = plan.allocate<uint32_t>(positions);
    plan.sort_memory = plan.allocate<char>(sort_bytes);
    plan.counts = plan.allocate<int32_t>(chunks_of(all) * kChildren);
    return plan;
}

void select_intervals_cuda(const SelectParams& params, const IntervalSelectPlan& plan, void* workspace,
                           int32_t* intervals, cudaStream_t stream) {
    using namespace cuda;
    const Sequences all(params, intervals);
    const int64_t positions = Sequences::positions(params), max_keys = max_keys_of(params);
    if (positions == 0) return;
    if (all.count() == 0) {  // keys without a sequence
        FLASH_CUDA_CHECK(cudaMemsetAsync(intervals, 0, 2 * positions * sizeof(int32_t), stream));
        return;
    }
    if (plan.by_chunks) return select_chunked_sequences(all, params.bias, stream);
    if (plan.one_launch) return select_short_sequences(all, params.bias, max_keys, stream);
    if (is_trivial(params, max_keys)) {
        make_keys<uint64_t>(all, params.bias, positions, nullptr, nullptr, stream);
        FLASH_CUDA_CHECK(cudaGetLastError());
        return;
    }

    const auto sort = sorts_64_bits(all, params.bias.dtype) ? sort_positions<uint64_t> : sort_positions<uint32_t>;
    DoubleBuffer<uint32_t> values = sort(all, params.bias, positions, plan, workspace, stream);
    const unsigned chunks = grid_of(chunks_of(all));
    const int chunk_bits = bits_for(kChunk);
    int node_bits = chunk_bits + bits_for(ceil_div<int64_t>(params.keys, kChunk));
    while (node_bits > chunk_bits) {
        const int child_bits = std::max(node_bits - kChildBits, chunk_bits);
        const Round round{node_bits, child_bits, values.current, values.other, plan.counts.in<int32_t>(workspace)};
        launch(count_arrivals_kernel, {chunks, kThreads}, stream, all, round);
        launch(partition_kernel, {chunks, kThreads}, stream, all, round);
        std::swap(values.current, values.other);
        node_bits = child_bits;
    }
    launch(eviction_kernel, {chunks, kThreads}, stream, all, values.current);
}

}  // namespace flash_dmattn
