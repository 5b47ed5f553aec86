// int8 x int8 GEMMs of small M, bound by reading the weight once: the scheme of skinny_fp8.cu with nothing to unpack. A thread's 16
// bytes are 16 adjacent k's of one output, and x is read with the same assignment, so they are directly the fragments of two steps
// of mma.m16n8k32. Sums are exact, so their order does not matter.
//
// Split-K: W adjacent warps share the K of 16 * NT outputs. With a smaller W, more warps of a CTA read the same x at about the same
// time, which then comes from the SM's L1 cache.
#include "cuda/gemm/int8.h"
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {
namespace {

constexpr int kPiece = 64;  // k's of one k-step

// c += a b of mma.m16n8k32.
__device__ __forceinline__ void multiply(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// No step is contracted to an FMA: models/cuda/reference.py gives the same bits.
__device__ __forceinline__ float scaled(int sum, float row, float column) { return __fmul_rn(__int2float_rn(sum), __fmul_rn(column, row)); }

// Writes the sums of each W warps, scaled, plus the bias, to out.
template <class T, int NT, int MT, int W>
__device__ __forceinline__ void store_sums(const Int8Scaling& scaling, const int (&acc)[NT][MT][4], int* sums, int first) {
  sum_warps<NT, MT, W>(acc, sums, first, scaling.n, scaling.m, [&](int output, int row, int total) {
    float value = scaled(total, scaling.x_scale[row], scaling.w_scale[output]);
    if (scaling.bias != nullptr) value = __fadd_rn(value, to_float(static_cast<const T*>(scaling.bias)[output]));
    static_cast<T*>(scaling.out)[row * scaling.out_stride + output] = from_float<T>(value);
  });
}

// A lane whose k's are past the end multiplies stale values by zeros.
template <class T, int NT, int MT, int DEPTH, int W>
__global__ void __launch_bounds__(kProductWarps * 32, MT <= 4 ? 2 : 1) skinny_int8_kernel(Int8Args args) {
  extern __shared__ int int8_sums[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT * (kProductWarps / W), way = warp % W;
  const int8_t* rows[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + (warp / W * NT + n) * 16 + half * 8 + g, args.scaling.n - 1);
      rows[n][half] = args.w + static_cast<int64_t>(row) * args.k;
    }
  }
  uint4 pieces[DEPTH][NT][2] = {};
  const int step = W * kPiece;
  int ahead = way * kPiece + t * 16;
  auto fetch = [&](uint4 (&piece)[NT][2]) {
    fetch_rows<NT>(piece, rows, ahead, args.k);
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(pieces[i]);
  pdl_launch_dependents();
  pdl_wait();
  const int8_t* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = args.x + min(m * 8 + g, args.scaling.m - 1) * args.x_stride;
  auto x_at = [&](int m, int k) { return k < args.k ? *reinterpret_cast<const uint4*>(columns[m] + k) : uint4{}; };
  constexpr int kAtOnce = MT <= 2 ? DEPTH : 1;  // pieces of x that are loaded together
  int acc[NT][MT][4] = {};
  for (int k = way * kPiece; k < args.k; k += DEPTH * step) {
    uint4 x[kAtOnce][MT];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (i % kAtOnce == 0) {
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
          for (int m = 0; m < MT; ++m) x[j][m] = x_at(m, k + (i + j) * step + t * 16);
        }
      }
      if (k + i * step < args.k) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4 low = pieces[i][n][0], high = pieces[i][n][1];
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint4& v = x[i % kAtOnce][m];
            multiply(acc[n][m], low.x, high.x, low.y, high.y, v.x, v.y);
            multiply(acc[n][m], low.z, high.z, low.w, high.w, v.z, v.w);
          }
        }
        fetch(pieces[i]);
      }
    }
  }
  store_sums<T, NT, MT, W>(args.scaling, acc, int8_sums, first);
}

template <class T, int NT, int MT, int DEPTH, int W>
void launch_int8(const Int8Args& args, Stream stream) {
  constexpr size_t shared = shared_floats<NT, MT>() * sizeof(int);
  constexpr int outputs = 16 * NT * (kProductWarps / W);
  const auto kernel = skinny_int8_kernel<T, NT, MT, DEPTH, W>;
  if (shared > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), "shared memory of skinny_int8");
  }
  launch(kernel, dim3((args.scaling.n + outputs - 1) / outputs), dim3(kProductWarps * 32), shared, stream, args);
}

// As many warps as a large GPU holds at once.
template <int NT>
int ways_of(const Int8Args& args) {
  constexpr int kWarps = 2112;
  int ways = kProductWarps;
  while (ways > 1 && (args.scaling.n + 16 * NT - 1) / (16 * NT) * ways > kWarps) ways /= 2;
  return ways;
}

template <class T, int NT, int MT, int DEPTH>
void run_int8(const Int8Args& args, Stream stream) {
  switch (args.ways != 0 ? args.ways : ways_of<NT>(args)) {
    case 1: return launch_int8<T, NT, MT, DEPTH, 1>(args, stream);
    case 2: return launch_int8<T, NT, MT, DEPTH, 2>(args, stream);
    case 4: return launch_int8<T, NT, MT, DEPTH, 4>(args, stream);
    default: return launch_int8<T, NT, MT, DEPTH, 8>(args, stream);
  }
}

constexpr int kTogether = 4;  // adjacent outputs per thread
constexpr int kScaledRows = 4;  // tokens per thread, which loads its outputs' scales once and has all their sums in flight

// A CTA scales kTogether * blockDim outputs of kScaledRows tokens.
template <class T>
__global__ void __launch_bounds__(kProductWarps * 32) skinny_int8_scale_kernel(const int32_t* sums, Int8Scaling scaling, bool is_aligned) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kTogether, first = blockIdx.x * kScaledRows;
  const bool has_outputs = at < scaling.n;
  float columns[kTogether] = {}, bias[kTogether] = {};
  if (has_outputs) {
    const float4 found = *reinterpret_cast<const float4*>(scaling.w_scale + at);
    columns[0] = found.x, columns[1] = found.y, columns[2] = found.z, columns[3] = found.w;
    if (scaling.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) bias[i] = to_float(static_cast<const T*>(scaling.bias)[at + i]);
    }
  }
  pdl_launch_dependents();
  pdl_wait();
  if (!has_outputs) return;
  int4 found[kScaledRows];
  float x_scale[kScaledRows];
#pragma unroll
  for (int i = 0; i < kScaledRows; ++i) {
    const int64_t row = min(first + i, scaling.m - 1);
    found[i] = *reinterpret_cast<const int4*>(sums + row * scaling.n + at);
    x_scale[i] = scaling.x_scale[row];
  }
#pragma unroll
  for (int i = 0; i < kScaledRows; ++i) {
    if (first + i >= scaling.m) break;
    float values[kTogether] = {scaled(found[i].x, x_scale[i], columns[0]), scaled(found[i].y, x_scale[i], columns[1]),
                               scaled(found[i].z, x_scale[i], columns[2]), scaled(found[i].w, x_scale[i], columns[3])};
    if (scaling.bias != nullptr) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) values[j] = __fadd_rn(values[j], bias[j]);
    }
    T* out = static_cast<T*>(scaling.out) + static_cast<int64_t>(first + i) * scaling.out_stride + at;
    if (is_aligned) {
      *reinterpret_cast<uint2*>(out) = make_uint2(pair_of<T>(values[0], values[1]), pair_of<T>(values[2], values[3]));
    } else {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) out[j] = from_float<T>(values[j]);
    }
  }
}

}  // namespace

void skinny_int8(const Int8Args& args, Stream stream) {
  const int m = args.scaling.m;
  if (m < 1 || args.scaling.n < 1) return;
  if (m > kInt8Rows || args.k < 1 || args.k > kInt8Length || args.k % 16 != 0 || args.x_stride % 16 != 0) {
    throw std::invalid_argument("skinny_int8 takes up to " + std::to_string(kInt8Rows) + " rows, 16 bytes at a time, and a K up to " +
                                std::to_string(kInt8Length) + " that 16 divides; got " + std::to_string(m) + " rows, K " + std::to_string(args.k) +
                                ", rows of x " + std::to_string(args.x_stride) + " apart");
  }
  with_half_type(args.scaling.type, [&](auto zero) {
    using T = decltype(zero);
    if (m <= 8) return run_int8<T, 1, 1, 4>(args, stream);
    if (m <= 16) return run_int8<T, 1, 2, 4>(args, stream);
    if (m <= 32) return run_int8<T, 2, 4, 2>(args, stream);
    run_int8<T, 2, 8, 2>(args, stream);
  });
}

void scale_int8(const int32_t* sums, const Int8Scaling& scaling, Stream stream) {
  if (scaling.m < 1 || scaling.n < 1) return;
  if (scaling.n % kTogether != 0) {
    throw std::invalid_argument("scale_int8 takes outputs that " + std::to_string(kTogether) + " divides; got " + std::to_string(scaling.n));
  }
  with_half_type(scaling.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int threads = kProductWarps * 32;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(scaling.out) % 8 == 0 && scaling.out_stride % kTogether == 0;
    const int chunks = (scaling.n + threads * kTogether - 1) / (threads * kTogether);
    const int groups = (scaling.m + kScaledRows - 1) / kScaledRows;
    launch(skinny_int8_scale_kernel<T>, dim3(groups, chunks), dim3(threads), 0, stream, sums, scaling, is_aligned);
  });
}

}  // namespace trireme::cuda
