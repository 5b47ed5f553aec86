// GEMMs of small M, 16-bit x, with a float8 weight and a float32 scale per 128 inputs of an output: the scheme of skinny_fp8.cu, with
// the sum of each 128 multiplied by its scale in float32.
#include "cuda/gemm/grouped.cuh"

namespace trireme::cuda {
namespace {

// Unpacked bf16 values are rescaled at once, for lack of exponent range; f16 ones together with the scale.
template <class T>
__device__ __forceinline__ uint32_t sized(uint32_t pair) {
  if constexpr (kFp8Unit<T> == kFp8Unit<bf16>) {
    const uint32_t unit = 0x7b807b80u, zero = 0x80008000u;  // 2^120, and -0, which keeps signs
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(unit), "r"(zero));
    return product;
  }
  return pair;
}

template <class T>
constexpr float kLeft = kFp8Unit<T> == kFp8Unit<bf16> ? 1.0f : 1.0f / kFp8Unit<T>;

// A warp's weights of one k-step: per 16 outputs, outputs g and g + 8, twice 16 values.
template <int NT>
struct Turn {
  uint4 values[NT][2][2];
  float scales[NT][2];
};

template <class T, int NT, int MT, int DEPTH>
__global__ void __launch_bounds__(kProductWarps * 32) fp8_blocks_kernel(GroupedArgs grouped) {
  extern __shared__ float sums[];
  const SkinnyArgs& args = grouped.product;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT;
  const uint8_t* rows[NT][2];
  const float* scales[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + n * 16 + half * 8 + g, args.n - 1);
      rows[n][half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(row) * args.k + t * 16;
      scales[n][half] = static_cast<const float*>(grouped.groups) + row;
    }
  }
  Turn<NT> turns[DEPTH];
  const int step = kProductWarps * kTurn;
  int ahead = warp * kTurn;
  auto fetch = [&](Turn<NT>& turn) {
    if (ahead < args.k) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          turn.values[n][half][0] = load_stream(rows[n][half] + ahead);
          turn.values[n][half][1] = load_stream(rows[n][half] + ahead + 64);
          turn.scales[n][half] = __ldg(scales[n][half] + static_cast<unsigned>(ahead) / kTurn * grouped.group_stride);
        }
      }
    }
    ahead += step;
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) fetch(turns[i]);
  pdl_launch_dependents();
  pdl_wait();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 16;
  float acc[NT][MT][4] = {}, part[NT][MT][4] = {};
  for (int k = warp * kTurn; k < args.k;) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (k < args.k) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          uint4 x[MT][2];
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            x[m][0] = *reinterpret_cast<const uint4*>(columns[m] + k + side * 64);
            x[m][1] = *reinterpret_cast<const uint4*>(columns[m] + k + side * 64 + 8);
          }
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const uint4 &low = turns[i].values[n][0][side], &high = turns[i].values[n][1][side];
            const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const Fp8Pairs a = unpack_fp8<T>(lows[j]), b = unpack_fp8<T>(highs[j]);
              const uint32_t a0 = sized<T>(a.even), a1 = sized<T>(b.even), a2 = sized<T>(a.odd), a3 = sized<T>(b.odd);
#pragma unroll
              for (int m = 0; m < MT; ++m) {
                const uint4 v = x[m][j / 2];
                const uint32_t c = j % 2 == 0 ? v.x : v.z, d = j % 2 == 0 ? v.y : v.w;
                multiply<T>(part[n][m], a0, a1, a2, a3, evens_of(c, d), odds_of(c, d));
              }
            }
          }
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) add_group<MT>(acc[n], part[n], turns[i].scales[n][0] * kLeft<T>, turns[i].scales[n][1] * kLeft<T>);
        fetch(turns[i]);
      }
      k += step;
    }
  }
  store_products<T, NT, MT>(args, acc, sums, first);
}

// A thread dequantizes 16 values.
template <class T>
__global__ void __launch_bounds__(kProductWarps * 32) expand_kernel(GroupedArgs grouped) {
  const SkinnyArgs& args = grouped.product;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kProductWarps * 32) + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  const int per_row = args.k / 16;
  if (index >= static_cast<int64_t>(args.n) * per_row) return;
  const int64_t row = index / per_row;
  const Pack<fp8> values = load_pack(static_cast<const fp8*>(args.w) + index * 16);
  const float scale = __ldg(static_cast<const float*>(grouped.groups) + row + index % per_row * 16 / kTurn * grouped.group_stride);
  T* out = static_cast<T*>(args.out) + index * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Pack<T> wide;
#pragma unroll
    for (int i = 0; i < 8; ++i) wide.v[i] = from_float<T>(to_float(values.v[half * 8 + i]) * scale);
    store_pack(out + half * 8, wide);
  }
}

void need_blocks(const char* op, const GroupedArgs& args) {
  need_grouped(op, args);
  if (args.group != kTurn) throw std::invalid_argument(std::string(op) + " takes groups of 128; got " + std::to_string(args.group));
}

}  // namespace

void expand_fp8_blocks(const GroupedArgs& args, Stream stream) {
  need_blocks("expand_fp8_blocks", args);
  const int64_t count = static_cast<int64_t>(args.product.n) * (args.product.k / 16);
  if (count < 1) return;
  with_half_type(args.product.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int threads = kProductWarps * 32;
    launch(expand_kernel<T>, dim3(static_cast<unsigned>((count + threads - 1) / threads)), dim3(threads), 0, stream, args);
  });
}

void skinny_fp8_blocks(const GroupedArgs& args, Stream stream) {
  need_blocks("skinny_fp8_blocks", args);
  if (args.product.m < 1) return;
  with_half_type(args.product.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.product.m <= 8) return launch_grouped<1, 1>(fp8_blocks_kernel<T, 1, 1, 3>, args, stream);
    if (args.product.m <= 16) return launch_grouped<2, 2>(fp8_blocks_kernel<T, 2, 2, 2>, args, stream);
    launch_grouped<2, 4>(fp8_blocks_kernel<T, 2, 4, 1>, args, stream);
  });
}

}  // namespace trireme::cuda
