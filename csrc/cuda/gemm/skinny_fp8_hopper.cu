// GEMMs of small M with a float8 weight on Hopper's warpgroup tensor cores, which take float8 operands from memory without
// unpacking. One persistent CTA per SM loops over its tiles of 16 outputs. 128 divides K.
//
// The weight arrives by TMA, 16 KiB per copy, in a ring of stages in shared memory: a producer thread issues the copies ahead of the
// wait for previous kernels. 16 warps read a stage, 64 k's each, as the 64-row operand: the 4 warps of a warpgroup hold the same 16
// outputs and different k's. x, loaded into shared memory once, is the narrow operand, with separate columns for each of the 4
// warps' k's; a warp's results for the others' columns are discarded. A thread holds 16 adjacent k's of an output; x is permuted to
// match.
//
// All of an SM's shared memory is requested: with half of it the next kernel's CTA would fit beside ours and prefetch while we still
// do, leaving nothing to prefetch while the small kernels between them run.
//
// x is split into two float8 columns, the value and 16 times its error: together they hold the 8 significant bits of bfloat16 for
// all values within 2^-13 of the token's amax.
#include <cuda.h>

#include <algorithm>

#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {

#ifdef TRIREME_HOPPER  // defined if this file is compiled for sm_90a

namespace {

constexpr int kTile = 16;                       // outputs of a tile
constexpr int kPiece = 64;                         // k's of a warp per stage
constexpr int kWarps = 16, kGroups = kWarps / 4;   // consumer warps and warpgroups
constexpr int kThreads = kWarps * 32;
constexpr int kStage = kWarps * kPiece;            // k's of a stage
constexpr int kLine = 128;                         // k's of a line of a stage: [kStage / kLine][kTile][kLine], 16 bytes swizzled by output
constexpr int kStageBytes = kTile * kStage;
constexpr int kMostRows = 4;
constexpr int kMostStages = 13, kLeastStages = 4;
constexpr int kBlockBytes = 225 << 10;             // of shared memory, maximum

struct Plan {
  int tiles, turns, stages;
  int sums, x;  // offsets in shared memory; stages come first
};

// ---------------------------------------------------------------- instructions

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for(uint64_t* barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}"
      ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}
// Copies a stage from this output and line on, with an evict-first hint: it is read once.
__device__ __forceinline__ void copy_stage(void* to, const CUtensorMap& weight, int output, int line, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(shared_address(to)), "l"(&weight), "r"(0), "r"(output), "r"(line), "r"(shared_address(barrier)), "l"(0x12f0000000000000ull)  // evict first
      : "memory");
}

__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Core matrices of 8 columns x 16 k's are consecutive, two along k for each 8 columns.
__device__ __forceinline__ uint64_t describe(const void* tile) {
  return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(128 >> 4) << 16 | static_cast<uint64_t>(256 >> 4) << 32;
}

#define TRIREME_PRODUCT(N, SUMS, A0, A1, A2, A3, DESC, KEEP)                                                          \
  "{.reg .pred keep; setp.ne.b32 keep, " KEEP ", 0;\n"                                                               \
  "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" SUMS "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " DESC ", keep, 1, 1;}\n"
#define TRIREME_SUMS(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TRIREME_INPUTS "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(x), "r"(keep)

// d [64, 8 N] = a [64, 32] x^T [32, 8 N], plus d if `keep`. Executed by a whole warpgroup.
template <int N>
__device__ __forceinline__ void multiply_fp8(float (&d)[N * 4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t x, int keep) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 1) {
    asm volatile(TRIREME_PRODUCT("8", "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", "%9") : TRIREME_SUMS(d, 0) : TRIREME_INPUTS);
  } else if constexpr (N == 2) {
    asm volatile(TRIREME_PRODUCT("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", "%13")
                 : TRIREME_SUMS(d, 0), TRIREME_SUMS(d, 4)
                 : TRIREME_INPUTS);
  } else {
    asm volatile(TRIREME_PRODUCT("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20", "%21")
                 : TRIREME_SUMS(d, 0), TRIREME_SUMS(d, 4), TRIREME_SUMS(d, 8), TRIREME_SUMS(d, 12)
                 : TRIREME_INPUTS);
  }
}

__device__ __forceinline__ uint32_t fp8_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 floats_of(uint32_t fp8_pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(fp8_pair)));
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// ---------------------------------------------------------------- x

// Two float8 columns (planes) for each token and each of 4 warps: N * 8 in all, for N tokens.
template <int N>
struct Columns {
  static constexpr int tile_bytes = N * 8 * 32;  // of one wgmma

  // Offset of the 4 k's from k on; 4 divides k.
  __device__ static int place(int row, int plane, int k) {
    const int piece = k / kPiece, word = k % 16 / 4, column = piece % 4 * 2 + plane;
    return (piece / 4 * 2 + word / 2) * tile_bytes + row * 256 + word % 2 * 128 + column * 16 + k % kPiece / 16 * 4;
  }
};

// Splits 16-bit tokens into two columns each, zero from K to `length` and for tokens from args.m on. inverse[row] receives the factor
// for the sums. Run by all kThreads threads, which sync at named barrier 1 and keep this many packs each between the two passes.
template <class T, int N, int Kept>
__device__ __forceinline__ void place_halves(const Fp8Args& args, uint8_t* x, float* inverse, float* peaks, int length) {
  using Columns = Columns<N>;
  constexpr int warps = kWarps / N;  // per token
  const int warp = threadIdx.x / 32, row = warp / warps, start = (warp % warps * 32 + threadIdx.x % 32) * 8;
  const int known = row < args.m ? args.k : 0;
  const T* from = static_cast<const T*>(args.x) + row * args.x_stride;
  Pack<T> kept[Kept];
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < Kept; ++i) {
    const int k = start + i * warps * 256;
    kept[i] = k < known ? load_pack(from + k) : Pack<T>{};
  }
  auto measure = [&](const Pack<T>& pack) {
#pragma unroll
    for (int j = 0; j < 8; ++j) peak = larger(peak, fabsf(to_float(pack.v[j])));
  };
#pragma unroll
  for (int i = 0; i < Kept; ++i) measure(kept[i]);
#pragma unroll 4
  for (int k = start + Kept * warps * 256; k < known; k += warps * 256) measure(load_pack(from + k));
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, lane));
  if (threadIdx.x % 32 == 0) peaks[warp] = peak;
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
#pragma unroll
  for (int i = 0; i < warps; ++i) peak = larger(peak, peaks[row * warps + i]);
  const uint32_t exponent = max(__float_as_uint(peak) >> 23 & 0xff, 8u);  // the amax is scaled to 2^7 .. 2^8
  const float scale = __uint_as_float((261u - exponent) << 23);
  if (warp % warps == 0 && threadIdx.x % 32 == 0) inverse[row] = exponent == 255 ? __uint_as_float(0x7fc00000u) : __uint_as_float((exponent - 7u) << 23);
  auto place = [&](const Pack<T>& pack, int k) {
    uint32_t words[2][2] = {};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float low = to_float(pack.v[i]) * scale, high = to_float(pack.v[i + 1]) * scale;
      const uint32_t whole = fp8_pair(low, high);
      const float2 found = floats_of(whole);
      words[0][i / 4] |= whole << (i % 4 * 8);
      words[1][i / 4] |= fp8_pair((low - found.x) * 16.0f, (high - found.y) * 16.0f) << (i % 4 * 8);
    }
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      *reinterpret_cast<uint32_t*>(x + Columns::place(row, plane, k)) = words[plane][0];
      *reinterpret_cast<uint32_t*>(x + Columns::place(row, plane, k + 4)) = words[plane][1];
    }
  };
#pragma unroll
  for (int i = 0; i < Kept; ++i) {
    const int k = start + i * warps * 256;
    if (k < length) place(kept[i], k);
  }
#pragma unroll 1
  for (int k = start + Kept * warps * 256; k < length; k += warps * 256) place(k < known ? load_pack(from + k) : Pack<T>{}, k);
}

// ---------------------------------------------------------------- the kernel

// Producer thread: loads this CTA's tiles, stage by stage.
__device__ __forceinline__ void bring_weight(const CUtensorMap& weight, const Plan& plan, uint8_t* stages, uint64_t* full, uint64_t* free) {
  int stage = 0, parity = 1;  // on the first pass all stages are free
  for (int tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    for (int turn = 0; turn < plan.turns; ++turn) {
      wait_for(&free[stage], parity);
      expect_bytes(&full[stage], kStageBytes);
      copy_stage(stages + stage * kStageBytes, weight, tile * kTile, turn * (kStage / kLine), &full[stage]);
      if (++stage == plan.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

template <class T, int N, int Kept>
__global__ void __launch_bounds__(kThreads + 32, 1) hopper_kernel(const __grid_constant__ CUtensorMap weight, Fp8Args args, Plan plan) {
  using Columns = Columns<N>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t full[kMostStages], free[kMostStages];
  __shared__ float inverse[N], peaks[kWarps];
  float* sums = reinterpret_cast<float*>(shared + plan.sums);  // [2][kWarps][N][kTile]
  uint8_t* x = shared + plan.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = warp / 4, quarter = warp % 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.stages; ++i) {
      init_barrier(&full[i], 1);
      init_barrier(&free[i], kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp == kWarps) {
    pdl_launch_dependents();
    if (lane == 0) bring_weight(weight, plan, shared, full, free);
    return;
  }
  pdl_launch_dependents();
  pdl_wait();
  place_halves<T, N, Kept>(args, x, inverse, peaks, plan.turns * kStage);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");

  constexpr uint64_t tile_step = Columns::tile_bytes >> 4;
  const uint64_t own = describe(x + group * 2 * Columns::tile_bytes);
  // Lanes that load simultaneously have outputs on both sides of the swizzle, hence different banks.
  const int output_of_g = g % 2 * 4 + g / 2;
  const uint8_t* piece = shared + ((warp / 2) * kTile + output_of_g) * kLine + ((warp % 2 * 4 + t) ^ output_of_g) * 16;
  int stage = 0, parity = 0, side = 0, count = 0;
  for (int tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x, side ^= 1, ++count) {
    // The storing threads rotate from tile to tile, and load scale and bias in advance.
    const int item = (threadIdx.x - count * 32) % kThreads, item_row = item / kTile, item_output = tile * kTile + item % kTile;
    const bool is_mine = item_row < args.m && item_output < args.n;
    const float scale = is_mine && args.scale != nullptr ? args.scale[item_output] : 1.0f;
    const float bias = is_mine && args.bias != nullptr ? to_float(static_cast<const T*>(args.bias)[item_output]) : 0.0f;
    float total[N * 4] = {};
#pragma unroll 1
    for (int turn = 0; turn < plan.turns; ++turn) {
      wait_for(&full[stage], parity);
      const uint4 a = *reinterpret_cast<const uint4*>(piece + stage * kStageBytes);
      const uint4 b = *reinterpret_cast<const uint4*>(piece + stage * kStageBytes + 8 * kLine);
      const uint64_t at = own + turn * 2 * kGroups * tile_step;
      float few[N * 4] = {};  // tensor cores accumulate with about 14 bits, so only few k's are summed there
      fence_products();
      multiply_fp8<N>(few, a.x, b.x, a.y, b.y, at, 0);
      multiply_fp8<N>(few, a.z, b.z, a.w, b.w, at + tile_step, 1);
      __syncwarp();
      if (lane == 0) arrive(&free[stage]);  // all lanes have loaded their operands
      finish_products();
#pragma unroll
      for (int j = 0; j < N * 4; ++j) total[j] += few[j];
      if (++stage == plan.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (t == quarter) {  // holds both planes of its warp's result
      float* own_sums = sums + (side * kWarps + warp) * N * kTile;
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          own_sums[n * kTile + half * 8 + output_of_g] = total[n * 4 + half * 2] + total[n * 4 + half * 2 + 1] * 0.0625f;
        }
      }
    }
    // Sums are double-buffered: a thread that rewrites a side has synced with all its readers in between.
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    if (is_mine) {
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) sum += sums[(side * kWarps + other) * N * kTile + item];
      static_cast<T*>(args.out)[item_row * args.out_stride + item_output] = from_float<T>(sum * inverse[item_row] * scale + bias);
    }
  }
}

int divided(int a, int b) { return (a + b - 1) / b; }

// Shared-memory layout for this many tokens; 0 stages if they do not fit.
Plan plan_of(int n, int k, int rows) {
  Plan plan{divided(n, kTile), divided(k, kStage), 0, 0, 0};
  const int sums = 2 * kWarps * rows * kTile * 4, x = plan.turns * kStage * rows * 2;
  plan.stages = std::min(kMostStages, std::max(0, kBlockBytes - sums - x) / kStageBytes);
  if (plan.stages < kLeastStages) plan.stages = 0;
  plan.sums = plan.stages * kStageBytes;
  plan.x = plan.sums + sums;
  return plan;
}

CUtensorMap map_of(const Fp8Args& args) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  if (encode == nullptr) throw std::runtime_error("fp8_linear: the driver has no cuTensorMapEncodeTiled");
  CUtensorMap map{};
  const auto n = static_cast<cuuint64_t>(args.n), k = static_cast<cuuint64_t>(args.k);
  const cuuint64_t sizes[3] = {kLine, n, k / kLine}, strides[2] = {k, kLine};
  const cuuint32_t box[3] = {kLine, kTile, kStage / kLine}, steps[3] = {1, 1, 1};
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(args.w), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("fp8_linear: the weight cannot be mapped, error " + std::to_string(status));
  return map;
}

template <class T, int N, int Kept>
void run_kept(const Fp8Args& args, Stream stream) {
  constexpr auto kernel = hopper_kernel<T, N, Kept>;
  const Plan plan = plan_of(args.n, args.k, N);
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBlockBytes);
  check(allowed, "shared memory of fp8_linear");
  const int blocks = std::min(plan.tiles, current_card().multiprocessors), shared = plan.x + plan.turns * kStage * N * 2;
  launch(kernel, dim3(blocks), dim3(kThreads + 32), static_cast<size_t>(shared), stream, map_of(args), args, plan);
}

template <class T, int N>
void run(const Fp8Args& args, Stream stream) {
  if (args.k * N <= kThreads * 8) return run_kept<T, N, 1>(args, stream);
  run_kept<T, N, 4>(args, stream);
}

}  // namespace

int fp8_linear_rows(int k) {
  if (current_card().major != 9 || k % kLine != 0) return 0;
  int rows = kMostRows;
  while (rows > 0 && plan_of(kTile, k, rows).stages == 0) rows /= 2;
  return rows;
}

void fp8_linear(const Fp8Args& args, Stream stream) {
  const int most = fp8_linear_rows(args.k);
  if (args.m > most) {
    throw std::invalid_argument("fp8_linear takes up to " + std::to_string(most) + " rows of " + std::to_string(args.k) + " values here; got " +
                                std::to_string(args.m));
  }
  if (args.m < 1) return;
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m == 1) return run<T, 1>(args, stream);
    if (args.m == 2) return run<T, 2>(args, stream);
    run<T, 4>(args, stream);
  });
}

#else

int fp8_linear_rows(int) { return 0; }
void fp8_linear(const Fp8Args&, Stream) { throw std::invalid_argument("fp8_linear was not compiled: CUDA_ARCHS must name 90"); }

#endif

}  // namespace trireme::cuda
