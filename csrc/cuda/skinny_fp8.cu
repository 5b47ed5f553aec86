// Products of few rows of x with a weight of float8 values and a scale per output: half the bytes of skinny.cu, the same plan.
// A thread's 16 bytes are 16 neighbouring k's of one row; x is read with the same assignment. x keeps its 16 bits, the
// weight being unpacked (four k's to a step), or is float8 itself with a scale per row, which halves what more rows read of x.
#include "cuda/products.cuh"

namespace trireme::cuda {
namespace {

constexpr int kPiece = 64;  // k's of one turn

// bf16 has no room for products of values 2^-120 times what they are, so the unit is multiplied in; f16 leaves it to the end.
template <class T>
__device__ __forceinline__ uint32_t to_unit(uint32_t pair) {
  if constexpr (kFp8Unit<T> == kFp8Unit<bf16>) {
    const uint32_t unit = 0x7b807b80u;  // 2^120
    uint32_t product;
    const uint32_t zero = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(unit), "r"(zero));
    return product;
  }
  return pair;
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
    if (ahead < args.k) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        piece[n][0] = load_stream(rows[n][0] + ahead);
        piece[n][1] = load_stream(rows[n][1] + ahead);
      }
    }
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(pieces[i]);
  let_next_start();
  wait_for_inputs();
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
          x[m][0] = *reinterpret_cast<const uint4*>(columns[m] + k);
          x[m][1] = *reinterpret_cast<const uint4*>(columns[m] + k + 8);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint32_t low[4] = {pieces[i][n][0].x, pieces[i][n][0].y, pieces[i][n][0].z, pieces[i][n][0].w};
          const uint32_t high[4] = {pieces[i][n][1].x, pieces[i][n][1].y, pieces[i][n][1].z, pieces[i][n][1].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Fp8Pairs a = unpack_fp8<T>(low[j]), b = unpack_fp8<T>(high[j]);
            const uint32_t a0 = to_unit<T>(a.even), a1 = to_unit<T>(b.even), a2 = to_unit<T>(a.odd), a3 = to_unit<T>(b.odd);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
              const uint4 v = x[m][j / 2];
              const uint32_t c = j % 2 == 0 ? v.x : v.z, d = j % 2 == 0 ? v.y : v.w;
              multiply<T>(acc[n][m], a0, a1, a2, a3, evens_of(c, d), odds_of(c, d));
            }
          }
        }
        fetch(pieces[i]);
      }
      k += step;
    }
  }
  if constexpr (kFp8Unit<T> != kFp8Unit<bf16>) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int m = 0; m < MT; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][m][i] *= 1.0f / kFp8Unit<T>;
      }
    }
  }
  store_products<T, NT, MT>(args, acc, sums, first);
}

// c += a b of mma.m16n8k32 in float8.
__device__ __forceinline__ void multiply_fp8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  __trap();  // models/layers/cuda_linear.py does not come here
#endif
}

template <class T, int NT, int MT, int DEPTH>
__global__ void __launch_bounds__(kProductWarps * 32, 2) fp8_both_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT, step = kProductWarps * kPiece;
  const uint8_t *rows[NT][2], *columns[MT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[n][half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(min(first + n * 16 + half * 8 + g, args.n - 1)) * args.k + t * 16;
    }
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const uint8_t*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 16;
  uint4 w[DEPTH][NT][2], x[DEPTH][MT];
  auto fetch_w = [&](int i, int k) {
    if (k < args.k) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        w[i][n][0] = load_stream(rows[n][0] + k);
        w[i][n][1] = load_stream(rows[n][1] + k);
      }
    }
  };
  auto fetch_x = [&](int i, int k) {
    if (k < args.k) {
#pragma unroll
      for (int m = 0; m < MT; ++m) x[i][m] = *reinterpret_cast<const uint4*>(columns[m] + k);
    }
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch_w(i, warp * kPiece + i * step);
  let_next_start();
  wait_for_inputs();
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch_x(i, warp * kPiece + i * step);
  float acc[NT][MT][4] = {};
  for (int k = warp * kPiece; k < args.k;) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (k < args.k) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const uint4 a = w[i][n][0], b = w[i][n][1], v = x[i][m];
            multiply_fp8(acc[n][m], a.x, b.x, a.y, b.y, v.x, v.y);
            multiply_fp8(acc[n][m], a.z, b.z, a.w, b.w, v.z, v.w);
          }
        }
        fetch_w(i, k + DEPTH * step);
        fetch_x(i, k + DEPTH * step);
      }
      k += step;
    }
  }
  store_products<T, NT, MT>(args, acc, sums, first);
}

template <class T>
void run_both(const SkinnyArgs& args, Stream stream) {
  if (args.m <= 8) return launch_products<1, 1>(fp8_both_kernel<T, 1, 1, 4>, args, stream);
  if (args.m <= 16) return launch_products<2, 2>(fp8_both_kernel<T, 2, 2, 3>, args, stream);
  launch_products<2, 4>(fp8_both_kernel<T, 2, 4, 2>, args, stream);
}

}  // namespace

void skinny_fp8(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.x_scale != nullptr) return run_both<T>(args, stream);
    if (args.m <= 8) return launch_products<1, 1>(fp8_kernel<T, 1, 1, 4>, args, stream);
    if (args.m <= 16) return launch_products<2, 2>(fp8_kernel<T, 2, 2, 3>, args, stream);
    launch_products<2, 4>(fp8_kernel<T, 2, 4, 2>, args, stream);
  });
}

}  // namespace trireme::cuda
