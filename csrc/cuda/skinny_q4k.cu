// Products of few rows of x with a weight of GGUF's Q4_K blocks (ggml-common.h: 256 values in 144 bytes), bound by reading those.
//
// A warp owns 16 outputs, or a part of their super-blocks, which it reads one ahead. Nibbles become 16-bit fragments in registers:
// scale * q - minimum, where scale and minimum of each run of 32 values are rounded to 16 bits, as are the results.
#include "cuda/products.cuh"

namespace trireme::cuda {
namespace {

constexpr int kValues = 256, kBytes = 144;  // of a super-block

__device__ __forceinline__ uint2 load_stream_half(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// What a thread has of a super-block: heads of rows g and g + 8, and of each of their four 32-byte chunks the t-th 8 bytes.
struct Super {
  uint4 head[2];
  uint2 nibbles[2][4];
};

__device__ __forceinline__ Super load_super(const uint8_t* const (&rows)[2], int64_t index, int t) {
  Super super;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint8_t* p = rows[half] + index * kBytes;
    super.head[half] = load_stream(p);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) super.nibbles[half][chunk] = load_stream_half(p + 16 + chunk * 32 + t * 8);
  }
  return super;
}

// Eight 6-bit scales and eight 6-bit minima as bytes, and the factors of both.
struct Scales {
  uint32_t scales[2], minima[2];
  float d, dmin;
};

__device__ __forceinline__ Scales unpack_scales(uint4 head) {
  const uint32_t a = head.y, b = head.z, c = head.w;
  Scales s;
  s.scales[0] = a & 0x3f3f3f3fu;
  s.minima[0] = b & 0x3f3f3f3fu;
  s.scales[1] = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
  s.minima[1] = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
  const __half2 factors = *reinterpret_cast<const __half2*>(&head.x);
  s.d = __low2float(factors);
  s.dmin = __high2float(factors);
  return s;
}

// Byte i of a word as float: put below the exponent of 2^23.
__device__ __forceinline__ float byte_of(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | i)) - 8388608.0f;
}

// The low nibbles of bytes 0 and 2 as a pair of T: an exponent below which they are whole numbers, less its value.
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

// Factors of a row's super-block, and what undoes the exponent below which bytes are read as floats.
struct Factors {
  float d, zero, dmin, zero_min;
};

__device__ __forceinline__ Factors factors_of(const Scales& s) { return {s.d, -8388608.0f * s.d, -s.dmin, 8388608.0f * s.dmin}; }

// Byte i of a word times `factor`, as a pair of T.
template <class T>
__device__ __forceinline__ uint32_t scaled_byte(uint32_t word, int i, float factor, float zero) {
  const float value = fmaf(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | i)), factor, zero);
  return pair_of<T>(value, value);
}

template <class T, int MT>
__device__ __forceinline__ void add_super(float (&total)[MT][4], const Super& super, const T* const (&columns)[MT], int64_t k) {
  const Scales scales[2] = {unpack_scales(super.head[0]), unpack_scales(super.head[1])};
  const Factors factors[2] = {factors_of(scales[0]), factors_of(scales[1])};
#pragma unroll
  for (int run = 0; run < 8; ++run) {
    uint4 x[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) x[m] = *reinterpret_cast<const uint4*>(columns[m] + k + run * 32);
    const int shift = run % 2 * 4;
    uint32_t a[2][4];  // of two steps: row g, row g + 8, both again
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Factors& f = factors[half];
      const uint32_t scale = scaled_byte<T>(scales[half].scales[run / 4], run % 4, f.d, f.zero);
      const uint32_t less = scaled_byte<T>(scales[half].minima[run / 4], run % 4, f.dmin, f.zero_min);
      const uint2 bytes = super.nibbles[half][run / 2];
      a[0][half] = value_pair<T>(nibble_pair<T>(bytes.x >> shift), scale, less);
      a[0][half + 2] = value_pair<T>(nibble_pair<T>(bytes.x >> (shift + 8)), scale, less);
      a[1][half] = value_pair<T>(nibble_pair<T>(bytes.y >> shift), scale, less);
      a[1][half + 2] = value_pair<T>(nibble_pair<T>(bytes.y >> (shift + 8)), scale, less);
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      multiply<T>(total[m], a[0][0], a[0][1], a[0][2], a[0][3], evens_of(x[m].x, x[m].y), odds_of(x[m].x, x[m].y));
      multiply<T>(total[m], a[1][0], a[1][1], a[1][2], a[1][3], evens_of(x[m].z, x[m].w), odds_of(x[m].z, x[m].w));
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
  let_next_start();
  wait_for_inputs();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 8;
  float acc[1][MT][4] = {};
  for (int index = warp % W; index < supers; index += W) {
    const Super now = next;
    if (index + W < supers) next = load_super(rows, index + W, t);
    add_super<T, MT>(acc[0], now, columns, static_cast<int64_t>(index) * kValues);
  }
  store_products<T, 1, MT, W>(args, acc, sums, first);
}

// As many warps as a large card holds at once, twice: one alone does not read fast enough.
int ways_of(const SkinnyArgs& args) {
  constexpr int kWarps = 4224;
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

// A warp expands a super-block: a lane's word has four values of one run in its low nibbles and four of the next in its high ones.
template <class T>
__global__ void __launch_bounds__(kProductWarps * 32) expand_kernel(const uint8_t* blocks, T* out, int64_t count) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kProductWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, chunk = lane / 8;
  wait_for_inputs();
  let_next_start();
  if (index >= count) return;
  const uint8_t* p = blocks + index * kBytes;
  const Scales scales = unpack_scales(*reinterpret_cast<const uint4*>(p));
  const uint32_t word = *reinterpret_cast<const uint32_t*>(p + 16 + lane * 4);
  T* to = out + index * kValues + chunk * 64 + lane % 8 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int run = chunk * 2 + half;
    const float scale = scales.d * byte_of(scales.scales[chunk / 2], run % 4), minimum = scales.dmin * byte_of(scales.minima[chunk / 2], run % 4);
    alignas(8) T values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = from_float<T>(scale * static_cast<float>(word >> (8 * i + 4 * half) & 15u) - minimum);
    *reinterpret_cast<uint2*>(to + half * 32) = *reinterpret_cast<const uint2*>(values);
  }
}

}  // namespace

void expand_q4_k(const void* blocks, void* out, int64_t count, Type type, Stream stream) {
  if (count < 1) return;
  with_half_type(type, [&](auto zero) {
    using T = decltype(zero);
    const dim3 grid(static_cast<unsigned>((count + kProductWarps - 1) / kProductWarps));
    launch(expand_kernel<T>, grid, dim3(kProductWarps * 32), 0, stream, static_cast<const uint8_t*>(blocks), static_cast<T*>(out), count);
  });
}

void skinny_q4_k(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return run_q4_k<T, 1>(args, stream);
    if (args.m <= 16) return run_q4_k<T, 2>(args, stream);
    run_q4_k<T, 4>(args, stream);
  });
}

}  // namespace trireme::cuda
