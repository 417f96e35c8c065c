// How batch elements that share a dense bias sum its gradient where dx is made. The blocks of one head and tile of keys,
// one a batch element, form a cluster and visit the same tiles of rows. Of every tile each block owns a part: the others
// send it theirs, to its shared memory, and it writes the sum. Nothing is computed twice.
#pragma once

#include "../common/cluster.cuh"
#include "bwd_tile.cuh"
#include "warp_gemm.cuh"

namespace flash_dmattn::cuda {

template <typename Tile>
struct DxExchangeSmem {
    static constexpr int kBlocks = Tile::kScoreM * Tile::kScoreN;  // of 16 x 8 pairs, of a warp's part of a tile
    // [batch element][block of the part that is owned here]; a thread receives what the same threads elsewhere hold.
    alignas(128) float4 parts[kBlocks][Tile::kThreads];
    uint64_t ready, received;  // barriers: every owner awaits the tile's parts; the parts owned here have come
};

template <typename Tile>
class DxExchange {
public:
    using Smem = DxExchangeSmem<Tile>;

    __device__ DxExchange(const SharedMemory& address_of, const Smem& smem)
        : parts_(address_of(smem.parts) + threadIdx.x * 16),
          ready_(address_of(smem.ready)),
          received_(address_of(smem.received)) {}

    // Before and after all else, by all threads of the cluster.
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            mbarrier_init(ready_, cluster_size());
            mbarrier_init(received_, 1);
        }
        cluster_sync();
    }
    __device__ __forceinline__ void end() const { cluster_sync(); }

    // For every tile, once all threads have called sum() for the tile before: its parts may be sent.
    __device__ __forceinline__ void await_parts() const {
        if (threadIdx.x < cluster_size()) mbarrier_arrive(in_block(ready_, threadIdx.x));
    }
    // `phase` is 0 for the first tile that is visited, 1 for the next, and so on in turn.
    __device__ __forceinline__ void send(const float (&dx)[Tile::kScoreM][Tile::kScoreN][4], int phase) const {
        const int size = cluster_size(), rank = cluster_rank(), owned = owned_blocks();
        mbarrier_wait(ready_, phase);
        if (threadIdx.x == 0) mbarrier_arrive_expecting(received_, owned * (size - 1) * Tile::kThreads * 16);
#pragma unroll
        for (int block = 0; block < Smem::kBlocks; ++block) {
            const float(&x)[4] = dx[block / Tile::kScoreN][block % Tile::kScoreN];
            const int owner = static_cast<uint32_t>(block * size) / Smem::kBlocks;
            const uint32_t to = parts_ + (block + (rank - owner) * owned) * Tile::kThreads * 16;
            if (owner == rank) {
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                             "f"(x[3])
                             : "memory");
            } else {
                store_async(in_block(to, owner), x, in_block(received_, owner));
            }
        }
    }

    // Calls visit(m, n, dx) for the blocks of the tile that are owned here.
    template <typename Visit>
    __device__ __forceinline__ void sum(int phase, const Visit& visit) const {
        const int size = cluster_size(), rank = cluster_rank(), owned = owned_blocks();
        mbarrier_wait(received_, phase);
#pragma unroll 1
        for (int i = 0; i < owned; ++i) {
            float dx[4] = {};
#pragma unroll 2
            for (int from = 0; from < size; ++from) {
                float x[4];
                asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                             : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                             : "r"(parts_ + (from * owned + i) * Tile::kThreads * 16)
                             : "memory");
#pragma unroll
                for (int e = 0; e < 4; ++e) dx[e] += x[e];
            }
            const int block = rank * owned + i;
            visit(block / Tile::kScoreN, block % Tile::kScoreN, dx);
        }
    }

private:
    // Of a tile, by each block of the cluster, whose size is a power of 2.
    __device__ __forceinline__ int owned_blocks() const { return Smem::kBlocks >> (__ffs(cluster_size()) - 1); }

    uint32_t parts_, ready_, received_;
};

}  // namespace flash_dmattn::cuda
