// GGUF quant block types in their GPU layout, 256 values at a time: int8 dot products per lane, and dequantization.
//
// Q4_K and Q5_K keep the file layout (ggml-common.h). The others are repacked at load (models/cuda/weights/gguf_blocks.py) in
// Q5_K's order: scales, code bits above the fourth, then 128 bytes of nibbles, where each chunk of 32 bytes holds one run of 32
// values in its low nibbles and the next in its high ones. Each type has
//   kBytes                      of 256 values; 16 divides it
//   add(total, block, x, step)  total[m] += dot product with 256 values of token m, tokens `step` bytes apart (XBlock)
//   codes(block, chunk, word)   four codes, as signed bytes, of run 2 * chunk and of the next: those from 4 * word on
//   line(block, run, word)      the mapping to values: scale * code - minimum
#pragma once

#include "cuda/gemm/gemm_tiles.cuh"
#include "cuda/gemm/q4k_head.cuh"

namespace trireme::cuda {

constexpr int kSuperValues = 256, kRunValues = 32;
// 256 values of x in shared memory: int8, 8 scales, 8 scaled sums, and 16 bytes of padding against bank conflicts.
constexpr int kXScales = 256, kXSums = 288, kXBytes = 336;

struct Pair {
  uint32_t first, second;
};
struct Line {
  float scale, minimum;
};

// An integer up to 2^22 in magnitude as float: placed below the exponent of 1.5 * 2^23.
__device__ __forceinline__ float float_of(int x) { return __int_as_float(x + 0x4b400000) - 12582912.0f; }
// Byte i of a word as float.
__device__ __forceinline__ float float_of_byte(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u | i)) - 8388608.0f;
}
__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float half_of(uint32_t word, int i) {
  const __half2 pair = *reinterpret_cast<const __half2*>(&word);
  return i == 0 ? __low2float(pair) : __high2float(pair);
}

// sum + dot of four bytes of a, signed or not, and four signed ones.
template <bool SIGNED>
__device__ __forceinline__ int dot_of(uint32_t a, uint32_t b, int sum) {
  int total;
  if constexpr (SIGNED) {
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(total) : "r"(a), "r"(b), "r"(sum));
  } else {
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(total) : "r"(a), "r"(b), "r"(sum));
  }
  return total;
}

__device__ __forceinline__ float2 floats_at(const uint8_t* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ const uint4* words_at(const uint8_t* p) { return reinterpret_cast<const uint4*>(p); }

// ---- scales of runs: line(run) gives scale and minimum without the common factors `scale` and `minimum`

// 6 bits each.
struct SixBits {
  static constexpr int kBytes = 16;
  static constexpr bool kMinima = true;
  RunScales s;
  __device__ __forceinline__ explicit SixBits(const uint8_t* block) : s(unpack_scales(*words_at(block))) {}
  __device__ __forceinline__ Line line(int run) const { return {float_of_byte(s.scales[run / 4], run % 4), float_of_byte(s.minima[run / 4], run % 4)}; }
  __device__ __forceinline__ Line factors() const { return {s.d, s.dmin}; }
};

// float16 each; ZERO is the code of zero.
template <int ZERO>
struct Halves {
  static constexpr int kBytes = 16;
  static constexpr bool kMinima = ZERO != 0;
  uint4 scales;
  __device__ __forceinline__ explicit Halves(const uint8_t* block) : scales(*words_at(block)) {}
  __device__ __forceinline__ Line line(int run) const {
    const float scale = half_of(word_of(scales, run / 2), run % 2);
    return {scale, scale * ZERO};
  }
  __device__ __forceinline__ Line factors() const { return {1.0f, 1.0f}; }
};

// float16 each, plus a float16 minimum.
struct HalfPairs {
  static constexpr int kBytes = 32;
  static constexpr bool kMinima = true;
  uint4 scales, least;
  __device__ __forceinline__ explicit HalfPairs(const uint8_t* block) : scales(words_at(block)[0]), least(words_at(block)[1]) {}
  __device__ __forceinline__ Line line(int run) const {
    return {half_of(word_of(scales, run / 2), run % 2), -half_of(word_of(least, run / 2), run % 2)};
  }
  __device__ __forceinline__ Line factors() const { return {1.0f, 1.0f}; }
};

// ---- codes: a pair of words of a chunk from its nibbles and the words of higher bits; the second is 1 << kShift times the codes

struct FourBits {
  static constexpr int kHighBytes = 0, kShift = 4;  // high nibbles are multiplied in place
  static constexpr bool kSigned = false;
  static __device__ __forceinline__ Pair pair(uint32_t nibbles, uint32_t, int) { return {nibbles & 0x0f0f0f0fu, nibbles & 0xf0f0f0f0u}; }
};

// Bit `run` of a byte is the fifth bit of that run's code.
struct FiveBits {
  static constexpr int kHighBytes = 32, kShift = 0;
  static constexpr bool kSigned = true;
  static __device__ __forceinline__ Pair pair(uint32_t nibbles, uint32_t high, int chunk) {
    const uint32_t bits = high >> (2 * chunk);
    return {(nibbles & 0x0f0f0f0fu) | (bits << 4 & 0x10101010u), (nibbles >> 4 & 0x0f0f0f0fu) | (bits << 3 & 0x10101010u)};
  }
};

// Codes of ggml's table kvalues_iq4nl, looked up 8 at a time by byte permutations.
struct Table {
  static constexpr int kHighBytes = 0, kShift = 0;
  static constexpr bool kSigned = true;
  static __device__ __forceinline__ uint32_t four(uint32_t nibbles) {
    const uint32_t low = __byte_perm(0xbfad9881u, 0xf6eaddcfu, nibbles & 0x7777u), high = __byte_perm(0x26190d01u, 0x71594535u, nibbles & 0x7777u);
    return __byte_perm(low, high, 0x3210u | (nibbles >> 1 & 0x4444u));
  }
  static __device__ __forceinline__ Pair pair(uint32_t nibbles, uint32_t, int) {
    const uint32_t a = four(nibbles & 0xffffu), b = four(nibbles >> 16);  // of bytes 0 and 1, of bytes 2 and 3
    return {__byte_perm(a, b, 0x6420), __byte_perm(a, b, 0x7531)};
  }
};

// ---- types with a scale per run of 32 values. A run's sum is at most 32 * 127 * 127, and 63 times 32 * 127 * 31 is below 2^23.

template <class Head, class Codes>
struct RunBlock {
  static constexpr int kHigh = Head::kBytes, kNibbles = kHigh + Codes::kHighBytes, kBytes = kNibbles + 128;

  template <int M>
  static __device__ __forceinline__ void add(float (&total)[M], const uint8_t* block, const uint8_t* x, int step) {
    const Head head(block);
    uint4 high[2] = {};
    if constexpr (Codes::kHighBytes > 0) {
      high[0] = words_at(block + kHigh)[0];
      high[1] = words_at(block + kHigh)[1];
    }
    float products[M] = {}, minima[M] = {};
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      int dots[2][M] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 bytes = words_at(block + kNibbles)[chunk * 2 + half];
        Pair codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = Codes::pair(word_of(bytes, i), word_of(high[half], i), chunk);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const uint4* values = words_at(x + m * step + chunk * 64) + half;
          const uint4 a = values[0], b = values[2];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dots[0][m] = dot_of<Codes::kSigned>(codes[i].first, word_of(a, i), dots[0][m]);
            dots[1][m] = dot_of<Codes::kSigned>(codes[i].second, word_of(b, i), dots[1][m]);
          }
        }
      }
      const Line a = head.line(chunk * 2), b = head.line(chunk * 2 + 1);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float2 unit = floats_at(x + m * step + kXScales + chunk * 8);
        products[m] = fmaf(float_of(dots[0][m]) * a.scale, unit.x, products[m]);
        products[m] = fmaf(float_of(dots[1][m] >> Codes::kShift) * b.scale, unit.y, products[m]);
        if constexpr (Head::kMinima) {
          const float2 sum = floats_at(x + m * step + kXSums + chunk * 8);
          minima[m] = fmaf(a.minimum, sum.x, minima[m]);
          minima[m] = fmaf(b.minimum, sum.y, minima[m]);
        }
      }
    }
    const Line factors = head.factors();
#pragma unroll
    for (int m = 0; m < M; ++m) total[m] = fmaf(factors.scale, products[m], fmaf(-factors.minimum, minima[m], total[m]));
  }

  static __device__ __forceinline__ Pair codes(const uint8_t* block, int chunk, int word) {
    const uint32_t nibbles = reinterpret_cast<const uint32_t*>(block + kNibbles)[chunk * 8 + word];
    const uint32_t high = Codes::kHighBytes > 0 ? reinterpret_cast<const uint32_t*>(block + kHigh)[word] : 0;
    const Pair pair = Codes::pair(nibbles, high, chunk);
    return {pair.first, pair.second >> Codes::kShift};
  }
  static __device__ __forceinline__ Line line(const uint8_t* block, int run, int) {
    const Head head(block);
    const Line line = head.line(run), factors = head.factors();
    return {line.scale * factors.scale, line.minimum * factors.minimum};
  }
};

using Q4K = RunBlock<SixBits, FourBits>;
using Q5K = RunBlock<SixBits, FiveBits>;
using Q4_0 = RunBlock<Halves<8>, FourBits>;
using Q4_1 = RunBlock<HalfPairs, FourBits>;
using Q5_0 = RunBlock<Halves<16>, FiveBits>;
using Q5_1 = RunBlock<HalfPairs, FiveBits>;
using IQ4NL = RunBlock<Halves<0>, Table>;

// ---- types with their own code layout

// 8 float16 scales, 256 signed bytes.
struct Q8_0 {
  static constexpr int kBytes = 272;

  template <int M>
  static __device__ __forceinline__ void add(float (&total)[M], const uint8_t* block, const uint8_t* x, int step) {
    const Halves<0> head(block);
#pragma unroll
    for (int run = 0; run < 8; ++run) {
      const uint4 codes[2] = {words_at(block + 16)[run * 2], words_at(block + 16)[run * 2 + 1]};
      const float scale = head.line(run).scale;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        int dot = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 values = words_at(x + m * step)[run * 2 + half];
#pragma unroll
          for (int i = 0; i < 4; ++i) dot = dot_of<true>(word_of(codes[half], i), word_of(values, i), dot);
        }
        const float unit = reinterpret_cast<const float*>(x + m * step + kXScales)[run];
        total[m] = fmaf(float_of(dot) * scale, unit, total[m]);
      }
    }
  }

  static __device__ __forceinline__ Pair codes(const uint8_t* block, int chunk, int word) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(block + 16) + chunk * 16 + word;
    return {words[0], words[8]};
  }
  static __device__ __forceinline__ Line line(const uint8_t* block, int run, int) { return Halves<0>(block).line(run); }
};

// 16 signed scales of 16 values each, their float16 factor and 14 bytes of padding; 64 bytes with 2 bits of each of 4 runs; nibbles.
// The code of zero is 32. A sum of 16 values is at most 16 * 127 * 32, and two of them times 128 are below 2^24.
struct Q6K {
  static constexpr int kHigh = 32, kNibbles = 96, kBytes = 224;

  static __device__ __forceinline__ Pair pair(uint32_t nibbles, uint32_t high, int chunk) {
    const uint32_t bits = high >> (chunk % 2 * 4);
    return {(nibbles & 0x0f0f0f0fu) | (bits << 4 & 0x30303030u), (nibbles >> 4 & 0x0f0f0f0fu) | (bits << 2 & 0x30303030u)};
  }
  static __device__ __forceinline__ int scale_of(const uint4& scales, int i) {
    return static_cast<int8_t>(word_of(scales, i / 4) >> (i % 4 * 8) & 255u);
  }

  template <int M>
  static __device__ __forceinline__ void add(float (&total)[M], const uint8_t* block, const uint8_t* x, int step) {
    const uint4 scales = *words_at(block);
    const float factor = half_of(*reinterpret_cast<const uint32_t*>(block + 16), 0);
    float products[M] = {};
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      int sums[2][M] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 bytes = words_at(block + kNibbles)[chunk * 2 + half], high = words_at(block + kHigh)[chunk / 2 * 2 + half];
        Pair codes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = pair(word_of(bytes, i), word_of(high, i), chunk);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const uint4* values = words_at(x + m * step + chunk * 64) + half;
          const uint4 a = values[0], b = values[2];
          int dots[2] = {};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dots[0] = dot_of<true>(0xe0e0e0e0u, word_of(a, i), dot_of<true>(codes[i].first, word_of(a, i), dots[0]));
            dots[1] = dot_of<true>(0xe0e0e0e0u, word_of(b, i), dot_of<true>(codes[i].second, word_of(b, i), dots[1]));
          }
          sums[0][m] += dots[0] * scale_of(scales, chunk * 4 + half);
          sums[1][m] += dots[1] * scale_of(scales, chunk * 4 + 2 + half);
        }
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float2 unit = floats_at(x + m * step + kXScales + chunk * 8);
        products[m] = fmaf(static_cast<float>(sums[0][m]), unit.x, products[m]);
        products[m] = fmaf(static_cast<float>(sums[1][m]), unit.y, products[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) total[m] = fmaf(factor, products[m], total[m]);
  }

  static __device__ __forceinline__ Pair codes(const uint8_t* block, int chunk, int word) {
    const uint32_t nibbles = reinterpret_cast<const uint32_t*>(block + kNibbles)[chunk * 8 + word];
    return pair(nibbles, reinterpret_cast<const uint32_t*>(block + kHigh)[chunk / 2 * 8 + word], chunk);
  }
  static __device__ __forceinline__ Line line(const uint8_t* block, int run, int word) {
    const float factor = half_of(*reinterpret_cast<const uint32_t*>(block + 16), 0);
    const float scale = factor * static_cast<float>(static_cast<int8_t>(block[run * 2 + word / 4]));
    return {scale, 32.0f * scale};
  }
};

}  // namespace trireme::cuda
