// GEMMs of small M with a weight of GGUF's Q4_K super-blocks (ggml-common.h: 256 values in 144 bytes), bound by reading it.
//
// A warp owns 16 outputs, or a part of their super-blocks, which it loads one ahead. Nibbles become 16-bit fragments in registers:
// scale * q - minimum, where scale and minimum of each run of 32 values are rounded to 16 bits, as are the results. The smallest M
// runs block_dots.cuh.
#include <algorithm>

#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {
namespace {

constexpr int kBestRows = 1;  // M up to which integer dot products are faster than tensor cores

constexpr int kValues = 256, kBytes = 144;  // of a super-block

// A thread's part of a super-block: heads of outputs g and g + 8, and the t-th 16 bytes of both halves of their nibbles. Those are in
// chunk 2 * j + t / 2 of 32 bytes, whose low nibbles are one run of 32 values and whose high ones the next.
struct Super {
  uint4 head[2];
  uint4 nibbles[2][2];
};

__device__ __forceinline__ Super load_super(const uint8_t* const (&rows)[2], int64_t index, int t) {
  Super super;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint8_t* p = rows[half] + index * kBytes;
    super.head[half] = load_stream(p);
#pragma unroll
    for (int j = 0; j < 2; ++j) super.nibbles[half][j] = load_stream(p + 16 + j * 64 + t * 16);
  }
  return super;
}

// The low nibbles of bytes 0 and 2 as a pair of T: integers below an exponent, minus its value.
template <class T>
__device__ __forceinline__ uint32_t nibble_pair(uint32_t word);
template <>
__device__ __forceinline__ uint32_t nibble_pair<bf16>(uint32_t word) {
  const uint32_t v = (word & 0x000f000fu) | 0x43004300u, one = 0x3f803f80u, less = 0xc300c300u;  // 128 + q
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(v), "r"(one), "r"(less));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t nibble_pair<f16>(uint32_t word) {
  const uint32_t v = (word & 0x000f000fu) | 0x64006400u, less = 0x64006400u;  // 1024 + q
  uint32_t pair;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(v), "r"(less));
  return pair;
}

// q * scale - minimum of a pair.
template <class T>
__device__ __forceinline__ uint32_t value_pair(uint32_t q, uint32_t scale, uint32_t less);
template <>
__device__ __forceinline__ uint32_t value_pair<bf16>(uint32_t q, uint32_t scale, uint32_t less) {
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(q), "r"(scale), "r"(less));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t value_pair<f16>(uint32_t q, uint32_t scale, uint32_t less) {
  uint32_t pair;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(q), "r"(scale), "r"(less));
  return pair;
}

// Factors of an output's super-block, and the offset that cancels the exponent under which bytes are read as floats.
struct Factors {
  float d, zero, dmin, zero_min;
};

__device__ __forceinline__ Factors factors_of(const RunScales& s) { return {s.d, -8388608.0f * s.d, -s.dmin, 8388608.0f * s.dmin}; }

// A byte of a word (by its __byte_perm selector) times `factor`, as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t scaled_byte(uint32_t word, uint32_t selector, float factor, float zero) {
  const T value = from_float<T>(fmaf(__uint_as_float(__byte_perm(word, 0x4b000000u, selector)), factor, zero));
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(&value);
  return __byte_perm(bits, bits, 0x1010);
}

// `columns` are tokens of x from the thread's first value on: k's of its chunk, 16 of each run.
template <class T, int MT>
__device__ __forceinline__ void add_super(float (&total)[MT][4], const Super& super, const T* const (&columns)[MT], int64_t k, uint32_t pick) {
  const RunScales scales[2] = {unpack_scales(super.head[0]), unpack_scales(super.head[1])};
  const Factors factors[2] = {factors_of(scales[0]), factors_of(scales[1])};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      uint4 x[MT][2];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint4* p = reinterpret_cast<const uint4*>(columns[m] + k + j * 128 + high * 32);
        x[m][0] = p[0];
        x[m][1] = p[1];
      }
      uint32_t scale[2], less[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Factors& f = factors[half];
        scale[half] = scaled_byte<T>(scales[half].scales[j], pick + high, f.d, f.zero);
        less[half] = scaled_byte<T>(scales[half].minima[j], pick + high, f.dmin, f.zero_min);
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t a[4];  // rows g, g + 8, both again: values 0 and 2, then 1 and 3
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4& n = super.nibbles[half][j];
          const uint32_t bytes = (word == 0 ? n.x : word == 1 ? n.y : word == 2 ? n.z : n.w) >> (4 * high);
          a[half] = value_pair<T>(nibble_pair<T>(bytes), scale[half], less[half]);
          a[half + 2] = value_pair<T>(nibble_pair<T>(bytes >> 8), scale[half], less[half]);
        }
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          const uint4& v = x[m][word / 2];
          const uint32_t c = word % 2 == 0 ? v.x : v.z, d = word % 2 == 0 ? v.y : v.w;
          multiply<T>(total[m], a[0], a[1], a[2], a[3], evens_of(c, d), odds_of(c, d));
        }
      }
    }
  }
}

template <class T, int MT, int W>
__global__ void __launch_bounds__(kProductWarps * 32) q4_k_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * (kProductWarps / W), supers = args.k / kValues;
  const uint8_t* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(first + warp / W * 16 + half * 8 + g, args.n - 1);
    rows[half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(row) * supers * kBytes;
  }
  Super next{};
  if (warp % W < supers) next = load_super(rows, warp % W, t);
  pdl_launch_dependents();
  pdl_wait();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t / 2 * 64 + t % 2 * 16;
  const uint32_t pick = 0x7440u + t / 2 * 2;  // selector of the thread's byte of a word of scales, for low nibbles
  float acc[1][MT][4] = {};
  for (int index = warp % W; index < supers; index += W) {
    const Super now = next;
    if (index + W < supers) next = load_super(rows, index + W, t);
    add_super<T, MT>(acc[0], now, columns, static_cast<int64_t>(index) * kValues, pick);
  }
  store_products<T, 1, MT, W>(args, acc, sums, first);
}

// As many warps as a large GPU holds at once.
int ways_of(const SkinnyArgs& args) {
  constexpr int kWarps = 2112;
  int ways = kProductWarps;
  while (ways > 1 && (args.n + 15) / 16 * ways > kWarps) ways /= 2;
  return ways;
}

template <class T, int MT>
void run_q4_k(const SkinnyArgs& args, Stream stream) {
  switch (args.ways != 0 ? args.ways : ways_of(args)) {
    case 1: return launch_products<1, MT, 1>(q4_k_kernel<T, MT, 1>, args, stream);
    case 2: return launch_products<1, MT, 2>(q4_k_kernel<T, MT, 2>, args, stream);
    case 4: return launch_products<1, MT, 4>(q4_k_kernel<T, MT, 4>, args, stream);
    default: return launch_products<1, MT, 8>(q4_k_kernel<T, MT, 8>, args, stream);
  }
}

}  // namespace

void expand_q4_k(const void* blocks, void* out, int64_t count, Type type, Stream stream) { run_expansion<Q4K>(blocks, out, count, type, stream); }

void skinny_q4_k(const SkinnyArgs& args, Stream stream) {
  if (args.ways == 0 && args.m <= std::min(kBestRows, rows_of_dots<Q4K>(args.n, args.k))) return run_dots<Q4K>(args, stream);
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return run_q4_k<T, 1>(args, stream);
    if (args.m <= 16) return run_q4_k<T, 2>(args, stream);
    run_q4_k<T, 4>(args, stream);
  });
}

}  // namespace trireme::cuda
