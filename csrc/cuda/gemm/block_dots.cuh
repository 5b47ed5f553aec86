// GEMMs of M = 1 to 4 with a weight of quant blocks, bound by reading it: x is quantized to int8 per run of 32 values, and the codes
// enter integer dot products without dequantization.
//
// A weight is super-blocks of 256 values, whose size 16 divides. A lane owns one super-block at a time, which its warp copied to
// shared memory two k-steps before, the first ones before the wait for previous kernels. A k-step of a warp is 32 super-blocks:
// `lanes` adjacent ones of each of 32 / lanes outputs. Each CTA quantizes x for itself.
//
// Quantization is off by half a unit at most: |x' - x| <= max |x of the run| / 254, so the error of an output is
// sum over the runs of max |x| / 254 * sum |w|, apart from summation order.
#pragma once

#include "cuda/async_copy.cuh"
#include "cuda/gemm/block_types.cuh"

namespace trireme::cuda {

constexpr int kDotRows = 4;  // maximum M
constexpr int kTurns = 2;       // k-steps of a warp in shared memory, loaded or in flight
constexpr int kTurnsAhead = 2;  // further k-steps that are prefetched into L2 before x is available

struct DotPlan {
  int supers, log_lanes, steps, groups;  // per output; lanes per output; k-steps per group of outputs; groups
  __host__ __device__ int lanes() const { return 1 << log_lanes; }
  __host__ __device__ int rows() const { return 32 >> log_lanes; }
};

// Bytes between super-blocks in shared memory: an odd number of 16 bytes, so that 8 lanes read from all banks.
template <class Block>
constexpr int kSlotBytes = Block::kBytes / 16 % 2 == 1 ? Block::kBytes : Block::kBytes + 16;

// A warp's k-step: one step of a group of outputs. The groups of a warp are `stride` apart.
struct Turn {
  int group, step;
  __device__ __forceinline__ void advance(const DotPlan& plan, int stride) {
    if (++step < plan.steps) return;
    step = 0;
    group += stride;
  }
};

// For a k-step: its first super-block in the weight, the last output after it, and how many super-blocks an output has left.
template <class Block>
struct Source {
  const uint8_t* from;
  int last, left;
  __device__ __forceinline__ Source(const SkinnyArgs& args, const DotPlan& plan, Turn turn) {
    const int row = turn.group * plan.rows(), index = turn.step << plan.log_lanes;
    from = static_cast<const uint8_t*>(args.w) + (static_cast<int64_t>(row) * plan.supers + index) * Block::kBytes;
    last = args.n - 1 - row;
    left = plan.supers - index;
  }
};

// Offsets of a lane's 16-byte parts of a k-step from its first super-block on.
template <class Block>
struct Parts {
  static constexpr int kCount = Block::kBytes / 16;
  int offset[kCount];
  __device__ __forceinline__ explicit Parts(const DotPlan& plan) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int super = super_of(i), row = super >> plan.log_lanes, place = super & (plan.lanes() - 1);
      offset[i] = (row * plan.supers + place) * Block::kBytes + at_of(i) % kCount * 16;
    }
  }
  static __device__ __forceinline__ int at_of(int i) { return i * 32 + threadIdx.x % 32; }
  static __device__ __forceinline__ int super_of(int i) { return at_of(i) / kCount; }
  static __device__ __forceinline__ int place_of(int i) {  // in shared memory
    if constexpr (kSlotBytes<Block> == Block::kBytes) return at_of(i) * 16;
    return at_of(i) * 16 + super_of(i) * 16;
  }
};

// Past the end of an output or of the outputs, zeros.
template <class Block>
__device__ __forceinline__ void copy_turn(const SkinnyArgs& args, const DotPlan& plan, Turn turn, const Parts<Block>& parts, uint32_t to) {
  const Source<Block> source(args, plan, turn);
  if (source.last >= plan.rows() - 1 && source.left >= plan.lanes()) {
#pragma unroll
    for (int i = 0; i < Parts<Block>::kCount; ++i) copy_async<true>(to + parts.place_of(i), source.from + parts.offset[i], true);
    return;
  }
#pragma unroll
  for (int i = 0; i < Parts<Block>::kCount; ++i) {
    const int super = parts.super_of(i);
    const bool is_inside = super >> plan.log_lanes <= source.last && (super & (plan.lanes() - 1)) < source.left;
    copy_async<false>(to + parts.place_of(i), is_inside ? source.from + parts.offset[i] : source.from, is_inside);
  }
}

template <class Block>
__device__ __forceinline__ void ask_for_turn(const SkinnyArgs& args, const DotPlan& plan, Turn turn) {
  const Source<Block> source(args, plan, turn);
  const int super = threadIdx.x % 32, row = super >> plan.log_lanes, place = super & (plan.lanes() - 1);
  if (row > source.last || place >= source.left) return;
  const uint8_t* from = source.from + (static_cast<int64_t>(row) * plan.supers + place) * Block::kBytes;
#pragma unroll
  for (int at = 0; at < Block::kBytes; at += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// Quantizes 8 values of a run, shared by 4 adjacent lanes, to int8 with scale and sum; `to` are the 256 values of x.
template <class T>
__device__ __forceinline__ void round_run(const Pack<T>& values, uint8_t* to, int run) {
  static_assert(Pack<T>::size == 8);
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = larger(most, fabsf(to_float(values.v[i])));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 1));
  most = larger(most, __shfl_xor_sync(0xffffffffu, most, 2));
  const bool is_zero = most < 1e-30f;
  const float unit = is_zero ? 0.0f : most * (1.0f / 127.0f), inverse = is_zero ? 0.0f : 127.0f * __frcp_rn(most);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t codes[4];  // in the lowest bytes: rounded by adding 1.5 * 2^23
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = __float_as_uint(fmaf(to_float(values.v[i * 4 + j]), inverse, 12582912.0f));
    words[i] = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
  }
  int sum = __dp4a(static_cast<int>(words[0]), 0x01010101, __dp4a(static_cast<int>(words[1]), 0x01010101, 0));
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  const int part = threadIdx.x % 4;
  *reinterpret_cast<uint2*>(to + run * kRunValues + part * 8) = make_uint2(words[0], words[1]);
  if (part == 0) {
    reinterpret_cast<float*>(to + kXScales)[run] = unit;
    reinterpret_cast<float*>(to + kXSums)[run] = unit * static_cast<float>(sum);
  }
}

// Loads and quantizes all tokens of x into shared memory, zero-padded: `slots` times 256 values each.
template <class T, int M>
__device__ __forceinline__ void round_rows(const SkinnyArgs& args, int slots, uint8_t* to) {
  constexpr int kAtOnce = 4, kPerPass = kProductWarps * 8;
  const int runs = slots * (kSuperValues / kRunValues) * M;  // 8 divides it: warps stay converged
  for (int first = threadIdx.x / 4; first < runs; first += kAtOnce * kPerPass) {
    Pack<T> values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int super = (first + i * kPerPass) / 8, m = 0;
#pragma unroll
      for (int other = 1; other <= M; ++other) {
        if (super < slots) break;
        super -= slots;
        m = other;
      }
      const int k = super * kSuperValues + (first + i * kPerPass) % 8 * kRunValues + threadIdx.x % 4 * 8;
      values[i] = {};
      if (m < args.m && k < args.k) values[i] = load_pack(static_cast<const T*>(args.x) + m * args.x_stride + k);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kPerPass;
      if (at < runs) round_run(values[i], to + at / 8 * kXBytes, at % 8);
    }
  }
}

// Block is a type of block_types.cuh.
template <class Block, class T, int M>
__global__ void __launch_bounds__(kProductWarps * 32) dots_kernel(SkinnyArgs args, DotPlan plan) {
  extern __shared__ uint4 shared[];
  constexpr int turn_bytes = 32 * kSlotBytes<Block>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, place = lane & (plan.lanes() - 1);
  uint8_t* ring = reinterpret_cast<uint8_t*>(shared) + warp * kTurns * turn_bytes;
  uint8_t* x = reinterpret_cast<uint8_t*>(shared) + kProductWarps * kTurns * turn_bytes;
  const uint32_t ring_address = shared_address(ring);
  const int stride = gridDim.x * kProductWarps;
  const Parts<Block> parts(plan);
  Turn now{static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x), 0}, next = now;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (next.group < plan.groups) copy_turn<Block>(args, plan, next, parts, ring_address + i * turn_bytes);
    commit_copies();
    next.advance(plan, stride);
  }
  Turn later = next;
#pragma unroll 1
  for (int i = 0; i < kTurnsAhead && later.group < plan.groups; ++i, later.advance(plan, stride)) ask_for_turn<Block>(args, plan, later);
  pdl_launch_dependents();
  pdl_wait();
  const int slots = plan.steps << plan.log_lanes;
  round_rows<T, M>(args, slots, x);
  __syncthreads();
  float total[M] = {};
  for (int slot = 0; now.group < plan.groups; slot = slot + 1 == kTurns ? 0 : slot + 1) {
    wait_for_copies<kTurns - 1>();
    __syncwarp();
    const int super = (now.step << plan.log_lanes) + place;
    Block::template add<M>(total, ring + slot * turn_bytes + lane * kSlotBytes<Block>, x + super * kXBytes, slots * kXBytes);
    __syncwarp();
    if (next.group < plan.groups) copy_turn<Block>(args, plan, next, parts, ring_address + slot * turn_bytes);
    commit_copies();
    next.advance(plan, stride);
    if (now.step + 1 == plan.steps) {
      const int row = now.group * plan.rows() + (lane >> plan.log_lanes);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        for (int other = plan.lanes() / 2; other > 0; other /= 2) total[m] += __shfl_xor_sync(0xffffffffu, total[m], other);
        if (place == m && m < args.m && row < args.n) {
          float found = total[m];
          if (args.scale != nullptr) found *= args.scale[row * args.scale_step];
          if (args.bias != nullptr) found += to_float(static_cast<const T*>(args.bias)[row]);
          static_cast<T*>(args.out)[m * args.out_stride + row] = from_float<T>(found);
        }
        total[m] = 0.0f;
      }
    }
    now.advance(plan, stride);
  }
}

// Chooses the number of lanes per output that minimizes the k-steps of the last warp; the largest on ties.
inline DotPlan plan_dots(int n, int supers, int warps) {
  DotPlan best{};
  int64_t least = INT64_MAX;
  for (int log_lanes = 5; log_lanes >= 2; --log_lanes) {
    DotPlan plan{supers, log_lanes, 0, 0};
    plan.steps = (supers + plan.lanes() - 1) / plan.lanes();
    plan.groups = (n + plan.rows() - 1) / plan.rows();
    const int64_t turns = static_cast<int64_t>((plan.groups + warps - 1) / warps) * plan.steps;
    if (turns >= least) continue;
    least = turns;
    best = plan;
  }
  return best;
}

inline DotPlan plan_dots(int n, int k, const Card& card) { return plan_dots(n, k / kSuperValues, card.multiprocessors * kProductWarps); }

template <class Block>
int64_t shared_of_dots(const DotPlan& plan, int rows) {
  return static_cast<int64_t>(kProductWarps) * kTurns * 32 * kSlotBytes<Block> + static_cast<int64_t>(rows) * (plan.steps << plan.log_lanes) * kXBytes;
}

// The largest M of 4, 2 or 1 that fits the GPU's shared memory; 0 if none does.
template <class Block>
int rows_of_dots(int n, int k) {
  const Card card = current_card();
  int rows = kDotRows;
  while (rows > 0 && shared_of_dots<Block>(plan_dots(n, k, card), rows) > card.shared_bytes) rows /= 2;
  return rows;
}

template <class Block, class T, int M>
void launch_dots(const SkinnyArgs& args, Stream stream) {
  const Card card = current_card();
  const DotPlan plan = plan_dots(args.n, args.k, card);
  const int shared = static_cast<int>(shared_of_dots<Block>(plan, M));
  const auto kernel = dots_kernel<Block, T, M>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory of block dots");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), "carveout of block dots");
  launch(kernel, dim3(min(card.multiprocessors, plan.groups)), dim3(kProductWarps * 32), shared, stream, args, plan);
}

// The GEMM for M up to rows_of_dots; 256 divides k.
template <class Block>
void run_dots(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m == 1) return launch_dots<Block, T, 1>(args, stream);
    if (args.m == 2) return launch_dots<Block, T, 2>(args, stream);
    launch_dots<Block, T, kDotRows>(args, stream);
  });
}

// A warp writes a super-block's values: each lane those of a word of two adjacent runs.
template <class Block, class T>
__global__ void __launch_bounds__(kProductWarps * 32) expand_blocks_kernel(const uint8_t* blocks, T* out, int64_t count) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kProductWarps + threadIdx.x / 32;
  const int chunk = threadIdx.x % 32 / 8, word = threadIdx.x % 8;
  pdl_wait();
  pdl_launch_dependents();
  if (index >= count) return;
  const uint8_t* block = blocks + index * Block::kBytes;
  const Pair codes = Block::codes(block, chunk, word);
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const Line line = Block::line(block, chunk * 2 + second, word);
    alignas(8) T values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int code = static_cast<int8_t>((second == 0 ? codes.first : codes.second) >> (8 * i) & 255u);
      values[i] = from_float<T>(line.scale * static_cast<float>(code) - line.minimum);
    }
    *reinterpret_cast<uint2*>(out + index * kSuperValues + chunk * 64 + second * 32 + word * 4) = *reinterpret_cast<const uint2*>(values);
  }
}

template <class Block>
void run_expansion(const void* blocks, void* out, int64_t count, Type type, Stream stream) {
  if (count < 1) return;
  with_half_type(type, [&](auto zero) {
    using T = decltype(zero);
    const dim3 grid(static_cast<unsigned>((count + kProductWarps - 1) / kProductWarps));
    launch(expand_blocks_kernel<Block, T>, grid, dim3(kProductWarps * 32), 0, stream, static_cast<const uint8_t*>(blocks), static_cast<T*>(out), count);
  });
}

// Compiled in block_dots_*.cu.
#define TRIREME_BLOCK_KERNELS(PREFIX, BLOCK)                               \
  PREFIX template void run_dots<BLOCK>(const SkinnyArgs&, Stream);          \
  PREFIX template void run_expansion<BLOCK>(const void*, void*, int64_t, Type, Stream);
TRIREME_BLOCK_KERNELS(extern, Q4K)
TRIREME_BLOCK_KERNELS(extern, Q5K)
TRIREME_BLOCK_KERNELS(extern, Q6K)
TRIREME_BLOCK_KERNELS(extern, Q8_0)
TRIREME_BLOCK_KERNELS(extern, Q4_0)
TRIREME_BLOCK_KERNELS(extern, Q4_1)
TRIREME_BLOCK_KERNELS(extern, Q5_0)
TRIREME_BLOCK_KERNELS(extern, Q5_1)
TRIREME_BLOCK_KERNELS(extern, IQ4NL)

}  // namespace trireme::cuda
