// GEMMs of small M with a float8 weight and a scale per output: half the bytes of skinny.cu, the same scheme. A thread's 16 bytes are
// 16 adjacent k's of one output; x, 16-bit, is read with the same assignment, and the weight is unpacked to its type (four k's per
// step).
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {
namespace {

constexpr int kPiece = 64;  // k's of one k-step

// bf16 would underflow for weights scaled by 2^-120: x, which needs fewer registers than the weight, is multiplied by 2^60, and the
// rest is applied at the end.
template <class T>
constexpr float kUnit = kFp8Unit<T>;
template <>
constexpr float kUnit<bf16> = 0x1p-60f;

template <class T>
__device__ __forceinline__ uint4 lifted(uint4 x) {
  if constexpr (kFp8Unit<T> != kFp8Unit<bf16>) return x;
  auto product = [](uint32_t pair) {
    const uint32_t factor = 0x5d805d80u;  // 2^60
    const uint32_t zero = 0x80008000u;
    uint32_t found;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(pair), "r"(factor), "r"(zero));
    return found;
  };
  return {product(x.x), product(x.y), product(x.z), product(x.w)};
}

template <class T, int NT, int MT, int DEPTH>
__global__ void __launch_bounds__(kProductWarps * 32) fp8_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT;
  const uint8_t* rows[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + n * 16 + half * 8 + g, args.n - 1);
      rows[n][half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(row) * args.k + t * 16;
    }
  }
  uint4 pieces[DEPTH][NT][2];
  const int step = kProductWarps * kPiece;
  int ahead = warp * kPiece;
  auto fetch = [&](uint4 (&piece)[NT][2]) {
    fetch_rows<NT>(piece, rows, ahead, args.k);
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(pieces[i]);
  pdl_launch_dependents();
  pdl_wait();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 16;
  float acc[NT][MT][4] = {};
  for (int k = warp * kPiece; k < args.k;) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (k < args.k) {
        uint4 x[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          x[m][0] = lifted<T>(*reinterpret_cast<const uint4*>(columns[m] + k));
          x[m][1] = lifted<T>(*reinterpret_cast<const uint4*>(columns[m] + k + 8));
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint32_t low[4] = {pieces[i][n][0].x, pieces[i][n][0].y, pieces[i][n][0].z, pieces[i][n][0].w};
          const uint32_t high[4] = {pieces[i][n][1].x, pieces[i][n][1].y, pieces[i][n][1].z, pieces[i][n][1].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Fp8Pairs a = unpack_fp8<T>(low[j]), b = unpack_fp8<T>(high[j]);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
              const uint4 v = x[m][j / 2];
              const uint32_t c = j % 2 == 0 ? v.x : v.z, d = j % 2 == 0 ? v.y : v.w;
              multiply<T>(acc[n][m], a.even, b.even, a.odd, b.odd, evens_of(c, d), odds_of(c, d));
            }
          }
        }
        fetch(pieces[i]);
      }
      k += step;
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][m][i] *= 1.0f / kUnit<T>;
    }
  }
  store_products<T, NT, MT>(args, acc, sums, first);
}

}  // namespace

void skinny_fp8(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return launch_products<1, 1>(fp8_kernel<T, 1, 1, 4>, args, stream);
    if (args.m <= 16) return launch_products<2, 2>(fp8_kernel<T, 2, 2, 3>, args, stream);
    launch_products<2, 4>(fp8_kernel<T, 2, 4, 2>, args, stream);
  });
}

}  // namespace trireme::cuda
