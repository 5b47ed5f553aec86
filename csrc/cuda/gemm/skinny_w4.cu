// GEMMs of small M with a weight of 4-bit codes, bound by reading it; and dequantization.
//
// A thread's 16 bytes are 32 codes of one output, laid out so that a shift and a mask put two adjacent k's below the exponent of a
// 16-bit value, and so that the four lanes of an output read 64 adjacent bytes of x. The tensor-core operand is code - zero, an exact
// integer; the sum of a quant group is multiplied by its scale in float32.
#include "cuda/gemm/grouped.cuh"

namespace trireme::cuda {
namespace {

// (word & mask) | exponent in one step.
__device__ __forceinline__ uint32_t masked_below(uint32_t word, uint32_t mask, uint32_t exponent) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(word), "r"(mask), "r"(exponent));
  return v;
}

// Codes k and k + 1, k even, of a word, minus their zero: integers below an exponent, which `less` cancels.
template <class T>
__device__ __forceinline__ uint32_t steps_of(uint32_t word, int pair, uint32_t less);
template <>
__device__ __forceinline__ uint32_t steps_of<bf16>(uint32_t word, int pair, uint32_t less) {
  const uint32_t v = masked_below(word >> (4 * pair), 0x000f000fu, 0x43004300u), one = 0x3f803f80u;  // 128 + code
  uint32_t steps;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(steps) : "r"(v), "r"(one), "r"(less));
  return steps;
}
template <>
__device__ __forceinline__ uint32_t steps_of<f16>(uint32_t word, int pair, uint32_t less) {
  const uint32_t v = masked_below(word >> (4 * pair), 0x000f000fu, 0x64006400u);  // 1024 + code
  uint32_t steps;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(steps) : "r"(v), "r"(less));
  return steps;
}

// -(128 + zero) or -(1024 + zero), twice.
template <class T>
constexpr uint32_t kLess = 0xe400e400u;
template <>
constexpr uint32_t kLess<bf16> = 0xc300c300u;

template <class T>
__device__ __forceinline__ uint32_t less_of(uint32_t group) { return __byte_perm(group, 0, 0x3232) + kLess<T>; }
__device__ __forceinline__ float scale_of(uint32_t group) { return __half2float(__ushort_as_half(static_cast<unsigned short>(group))); }

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// A warp's weights of one k-step: per 16 outputs, outputs g and g + 8.
template <int NT, int GROUP>
struct Turn {
  uint4 codes[NT][2];
  uint32_t groups[NT][2][kTurn / GROUP];
};

template <class T, int NT, int MT, int DEPTH, int GROUP>
__global__ void __launch_bounds__(kProductWarps * 32) w4_kernel(GroupedArgs grouped) {
  extern __shared__ float sums[];
  const SkinnyArgs& args = grouped.product;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT;
  const uint8_t* rows[NT][2];
  const uint32_t* groups[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + n * 16 + half * 8 + g, args.n - 1);
      rows[n][half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(row) * (args.k / 2) + t * 16;
      groups[n][half] = static_cast<const uint32_t*>(grouped.groups) + row;
    }
  }
  Turn<NT, GROUP> turns[DEPTH];
  const int step = kProductWarps * kTurn;
  int ahead = warp * kTurn;
  auto fetch = [&](Turn<NT, GROUP>& turn) {
    if (ahead < args.k) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          turn.codes[n][half] = load_stream(rows[n][half] + static_cast<unsigned>(ahead) / 2);
#pragma unroll
          for (int i = 0; i < kTurn / GROUP; ++i) turn.groups[n][half][i] = __ldg(groups[n][half] + (static_cast<unsigned>(ahead) / GROUP + i) * grouped.group_stride);
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
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 8;
  float acc[NT][MT][4] = {}, part[NT][MT][4] = {};
  for (int k = warp * kTurn; k < args.k;) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (k < args.k) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          uint4 x[MT];
#pragma unroll
          for (int m = 0; m < MT; ++m) x[m] = *reinterpret_cast<const uint4*>(columns[m] + k + word * 32);
          const int group = word * 32 / GROUP;
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const uint32_t low = word_of(turns[i].codes[n][0], word), high = word_of(turns[i].codes[n][1], word);
            const uint32_t low_group = turns[i].groups[n][0][group], high_group = turns[i].groups[n][1][group];
            const uint32_t less_low = less_of<T>(low_group), less_high = less_of<T>(high_group);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const uint32_t a0 = steps_of<T>(low, 2 * j, less_low), a1 = steps_of<T>(high, 2 * j, less_high);
              const uint32_t a2 = steps_of<T>(low, 2 * j + 1, less_low), a3 = steps_of<T>(high, 2 * j + 1, less_high);
#pragma unroll
              for (int m = 0; m < MT; ++m) multiply<T>(part[n][m], a0, a1, a2, a3, j == 0 ? x[m].x : x[m].z, j == 0 ? x[m].y : x[m].w);
            }
            if ((word + 1) * 32 % GROUP == 0) add_group<MT>(acc[n], part[n], scale_of(low_group), scale_of(high_group));
          }
        }
        fetch(turns[i]);
      }
      k += step;
    }
  }
  store_products<T, NT, MT>(args, acc, sums, first);
}

template <class T, int GROUP>
void run_w4(const GroupedArgs& args, Stream stream) {
  if (args.product.m <= 8) return launch_grouped<1, 1>(w4_kernel<T, 1, 1, 4, GROUP>, args, stream);
  if (args.product.m <= 16) return launch_grouped<2, 2>(w4_kernel<T, 2, 2, 2, GROUP>, args, stream);
  launch_grouped<2, 4>(w4_kernel<T, 2, 4, 2, GROUP>, args, stream);
}

// A thread dequantizes the 16 bytes of a lane.
template <class T>
__global__ void __launch_bounds__(kProductWarps * 32) expand_kernel(GroupedArgs grouped) {
  const SkinnyArgs& args = grouped.product;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kProductWarps * 32) + threadIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  const int per_row = args.k / 32;
  if (index >= static_cast<int64_t>(args.n) * per_row) return;
  const int64_t row = index / per_row;
  const int lane = static_cast<int>(index % per_row), k = lane / 4 * kTurn + lane % 4 * 8;
  const uint4 codes = load_stream(static_cast<const uint8_t*>(args.w) + index * 16);
  const uint32_t* groups = static_cast<const uint32_t*>(grouped.groups) + row;
  T* out = static_cast<T*>(args.out) + row * args.k + k;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const uint32_t group = __ldg(groups + (k + word * 32) / grouped.group * grouped.group_stride), codes_here = word_of(codes, word);
    const float scale = scale_of(group);
    const int zero = static_cast<int>(group >> 16);
    Pack<T> values;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int code = static_cast<int>(codes_here >> (4 * (i / 2) + 16 * (i % 2)) & 15u);
      values.v[i] = from_float<T>(scale * static_cast<float>(code - zero));
    }
    store_pack(out + word * 32, values);
  }
}

}  // namespace

void skinny_w4(const GroupedArgs& args, Stream stream) {
  need_grouped("skinny_w4", args);
  if (args.product.m < 1) return;
  with_half_type(args.product.type, [&](auto zero) {
    using T = decltype(zero);
    switch (args.group) {
      case 32: return run_w4<T, 32>(args, stream);
      case 64: return run_w4<T, 64>(args, stream);
      default: return run_w4<T, 128>(args, stream);
    }
  });
}

void expand_w4(const GroupedArgs& args, Stream stream) {
  need_grouped("expand_w4", args);
  const int64_t count = static_cast<int64_t>(args.product.n) * (args.product.k / 32);
  if (count < 1) return;
  with_half_type(args.product.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int threads = kProductWarps * 32;
    launch(expand_kernel<T>, dim3(static_cast<unsigned>((count + threads - 1) / threads)), dim3(threads), 0, stream, args);
  });
}

}  // namespace trireme::cuda
