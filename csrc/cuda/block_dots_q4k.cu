// Integer dot products with GGUF's Q4_K super-blocks (ggml-common.h: 256 values in 144 bytes) as they lie.
#include "cuda/block_dots.cuh"
#include "cuda/q4k.cuh"

namespace trireme::cuda {
namespace {

// High nibbles are multiplied where they lie, which makes sums 16 times as large. A sum of a run is 32 * 127 * 15 at most, and 63
// times that below 2^22.
struct Q4K {
  static constexpr int kBytes = 144;

  template <int M>
  static __device__ __forceinline__ void add(float (&total)[M], const uint8_t* block, const uint8_t* x, int x_stride) {
    const uint4* words = reinterpret_cast<const uint4*>(block);
    const RunScales scales = unpack_scales(words[0]);
    float products[M] = {}, minima[M] = {};
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {  // of 32 bytes: low nibbles are one run, high nibbles the next
      int dots[2][M] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 bytes = words[1 + chunk * 2 + half];
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const uint4* values = reinterpret_cast<const uint4*>(x + m * x_stride + chunk * 64) + half;
          const uint4 low = values[0], high = values[2];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dots[0][m] = dot_unsigned(word_of(bytes, i) & 0x0f0f0f0fu, word_of(low, i), dots[0][m]);
            dots[1][m] = dot_unsigned(word_of(bytes, i) & 0xf0f0f0f0u, word_of(high, i), dots[1][m]);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float2 unit = *reinterpret_cast<const float2*>(x + m * x_stride + kXScales + chunk * 8);
        const float2 sum = *reinterpret_cast<const float2*>(x + m * x_stride + kXSums + chunk * 8);
        const int run = chunk % 2 * 2;
        products[m] = fmaf(float_of(dots[0][m] * byte_at(scales.scales[chunk / 2], run)), unit.x, products[m]);
        products[m] = fmaf(float_of((dots[1][m] >> 4) * byte_at(scales.scales[chunk / 2], run + 1)), unit.y, products[m]);
        minima[m] = fmaf(float_of_byte(scales.minima[chunk / 2], run), sum.x, minima[m]);
        minima[m] = fmaf(float_of_byte(scales.minima[chunk / 2], run + 1), sum.y, minima[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) total[m] = fmaf(scales.d, products[m], fmaf(-scales.dmin, minima[m], total[m]));
  }
};

}  // namespace

bool dots_q4_k(const SkinnyArgs& args, Stream stream) { return run_dots<Q4K>(args, stream); }

}  // namespace trireme::cuda
