// Products of few rows of x with a weight of GGUF's Q4_K blocks (ggml-common.h: 256 values in 144 bytes), bound by reading those.
//
// A block owns 16 outputs; its warps take turns over the super-blocks of its rows. Nibbles become exact 16-bit fragments. Each
// run of 32 values has an accumulator of its own, since scale and minimum change from run to run: d * scale * (q . x) -
// dmin * minimum * sum(x), the sum of x from a tile of ones.
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

template <class T>
constexpr uint32_t kOnes = 0x3f803f80u;
template <>
constexpr uint32_t kOnes<f16> = 0x3c003c00u;

template <class T, int MT>
__device__ __forceinline__ void add_run(float (&total)[MT][4], const uint32_t (&low)[2], const uint32_t (&high)[2], const uint4 (&x)[MT],
                                        const float (&scale)[2], const float (&minimum)[2]) {
  uint32_t a[2][4];
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    a[step][0] = nibble_pair<T>(low[step]);
    a[step][1] = nibble_pair<T>(high[step]);
    a[step][2] = nibble_pair<T>(low[step] >> 8);
    a[step][3] = nibble_pair<T>(high[step] >> 8);
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    float product[4] = {}, sum[4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint32_t c = step == 0 ? x[m].x : x[m].z, d = step == 0 ? x[m].y : x[m].w;
      const uint32_t even = evens_of(c, d), odd = odds_of(c, d);
      multiply<T>(product, a[step][0], a[step][1], a[step][2], a[step][3], even, odd);
      multiply<T>(sum, kOnes<T>, kOnes<T>, kOnes<T>, kOnes<T>, even, odd);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[m][i] += scale[i / 2] * product[i] - minimum[i / 2] * sum[i];
  }
}

template <class T, int MT>
__device__ __forceinline__ void add_super(float (&total)[MT][4], const Super& super, const T* const (&columns)[MT], int64_t k) {
  const Scales scales[2] = {unpack_scales(super.head[0]), unpack_scales(super.head[1])};
#pragma unroll
  for (int run = 0; run < 8; ++run) {
    uint4 x[MT];
#pragma unroll
    for (int m = 0; m < MT; ++m) x[m] = *reinterpret_cast<const uint4*>(columns[m] + k + run * 32);
    const int shift = run % 2 * 4;
    const uint2 a = super.nibbles[0][run / 2], b = super.nibbles[1][run / 2];
    const uint32_t low[2] = {a.x >> shift, a.y >> shift}, high[2] = {b.x >> shift, b.y >> shift};
    float scale[2], minimum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = scales[half].d * byte_of(scales[half].scales[run / 4], run % 4);
      minimum[half] = scales[half].dmin * byte_of(scales[half].minima[run / 4], run % 4);
    }
    add_run<T, MT>(total, low, high, x, scale, minimum);
  }
}

template <class T, int MT>
__global__ void __launch_bounds__(kProductWarps * 32) q4_k_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16, supers = args.k / kValues;
  const uint8_t* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows[half] = static_cast<const uint8_t*>(args.w) + static_cast<int64_t>(min(first + half * 8 + g, args.n - 1)) * supers * kBytes;
  }
  Super next{};
  if (warp < supers) next = load_super(rows, warp, t);
  let_next_start();
  wait_for_inputs();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 8;
  float acc[1][MT][4] = {};
  for (int index = warp; index < supers; index += kProductWarps) {
    const Super now = next;
    if (index + kProductWarps < supers) next = load_super(rows, index + kProductWarps, t);
    add_super<T, MT>(acc[0], now, columns, static_cast<int64_t>(index) * kValues);
  }
  store_products<T, 1, MT>(args, acc, sums, first);
}

}  // namespace

void skinny_q4_k(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return launch_products<1, 1>(q4_k_kernel<T, 1>, args, stream);
    if (args.m <= 16) return launch_products<1, 2>(q4_k_kernel<T, 2>, args, stream);
    launch_products<1, 4>(q4_k_kernel<T, 4>, args, stream);
  });
}

}  // namespace trireme::cuda
