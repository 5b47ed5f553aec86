// Shared by the skinny GEMMs: streaming loads, mma steps, float8 to 16-bit fragments, the reduction over a CTA's warps.
#pragma once

#include "cuda/device.cuh"

namespace trireme::cuda {

constexpr int kProductWarps = 8;

// Loads 16 bytes of a weight that is read once.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Prefetches the 128 bytes around p into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// c += a b of mma.m16n8k16; T is bf16 or f16.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two values of T in one register, the first in the low half.
template <class T>
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}

// Splits two registers of two 16-bit values into those at even and odd positions.
__device__ __forceinline__ uint32_t evens_of(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t odds_of(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// Four e4m3 values as two pairs of T: bytes 0 and 2, bytes 1 and 3. Sign, exponent and fraction move to their positions in T, whose
// exponent has another bias: the results are the values times kFp8Unit<T>, including subnormals.
template <class T>
constexpr float kFp8Unit = 0x1p-8f;
template <>
constexpr float kFp8Unit<bf16> = 0x1p-120f;

struct Fp8Pairs {
  uint32_t even, odd;
};

template <class T>
__device__ __forceinline__ Fp8Pairs unpack_fp8(uint32_t bytes) {
  constexpr int shift = kFp8Unit<T> == kFp8Unit<f16> ? 1 : 4;
  constexpr uint32_t mask = 0x7f007f00u >> shift;
  const uint32_t low = bytes << 8;
  return {(low >> shift & mask) | (low & 0x80008000u), (bytes >> shift & mask) | (bytes & 0x80008000u)};
}

// The next 16 bytes for outputs g and g + 8 of each of NT tiles, unless they end before `at`.
template <int NT, class Byte>
__device__ __forceinline__ void fetch_rows(uint4 (&piece)[NT][2], const Byte* const (&rows)[NT][2], int at, int end) {
  if (at >= end) return;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    piece[n][0] = load_stream(rows[n][0] + at);
    piece[n][1] = load_stream(rows[n][1] + at);
  }
}

// Reduces acc [NT * 16 outputs, MT * 8 tokens] over a CTA's warps, where each W adjacent warps hold parts of the same outputs, in warp
// order: calls store(output, row, sum) for outputs before `num_outputs`, starting at the CTA's `first`, and the first `num_rows`
// tokens. `sums` is dynamic shared memory of shared_floats<NT, MT>() values.
template <int NT, int MT>
constexpr size_t shared_floats() { return static_cast<size_t>(kProductWarps) * 16 * NT * (8 * MT + 1); }

template <int NT, int MT, int W, class V, class Store>
__device__ __forceinline__ void sum_warps(const V (&acc)[NT][MT][4], V* sums, int first, int num_outputs, int num_rows, Store store) {
  constexpr int stride = 8 * MT + 1, own = 16 * NT, outputs = own * (kProductWarps / W);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[(warp * own + n * 16 + g + i / 2 * 8) * stride + m * 8 + t * 2 + i % 2] = acc[n][m][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < outputs * num_rows; i += kProductWarps * 32) {
    const int at = i % outputs, row = i / outputs, output = first + at;
    if (output >= num_outputs) continue;
    const int from = at / own * W * own + at % own;
    V total = 0;
#pragma unroll
    for (int other = 0; other < W; ++other) total += sums[(other * own + from) * stride + row];
    store(output, row, total);
  }
}

// Writes the sums times the output's scale, plus the bias, to out.
template <class T, int NT, int MT, int W = kProductWarps>
__device__ __forceinline__ void store_products(const SkinnyArgs& args, const float (&acc)[NT][MT][4], float* sums, int first) {
  sum_warps<NT, MT, W>(acc, sums, first, args.n, args.m, [&](int output, int row, float total) {
    if (args.scale != nullptr) total *= args.scale[output * args.scale_step];
    if (args.bias != nullptr) total += to_float(static_cast<const T*>(args.bias)[output]);
    static_cast<T*>(args.out)[row * args.out_stride + output] = from_float<T>(total);
  });
}

// Launches a kernel of (SkinnyArgs) with one CTA per 16 * NT outputs for each W of its warps.
template <int NT, int MT, int W = kProductWarps>
void launch_products(void (*kernel)(SkinnyArgs), const SkinnyArgs& args, Stream stream) {
  constexpr size_t shared = shared_floats<NT, MT>() * sizeof(float);
  if (shared > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "shared memory of skinny_linear");
  }
  constexpr int outputs = 16 * NT * (kProductWarps / W);
  launch(kernel, dim3((args.n + outputs - 1) / outputs), dim3(kProductWarps * 32), shared, stream, args);
}

// The kernels behind skinny_linear, by weight format.
void skinny_dense(const SkinnyArgs& args, Stream stream);
void skinny_fp8(const SkinnyArgs& args, Stream stream);
void skinny_q4_k(const SkinnyArgs& args, Stream stream);

}  // namespace trireme::cuda
