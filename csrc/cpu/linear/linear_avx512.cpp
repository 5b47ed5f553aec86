// Kernels of linear.h for AVX-512 F/BW/VL/DQ/VNNI. Compiled with those flags: nothing here may be an inline function
// with external linkage, or the linker could keep this copy of it for machines without AVX-512.
#define TRIREME_VNNI_LANES 16
#include "cpu/linear/linear_vnni_rows.h"

namespace trireme {
namespace {

// From this M on, weights are unpacked once per call.
constexpr int kGroupedFrom = 32;

// ---------------------------------------------------------------- activations

INLINE uint32_t max_lanes(__m512i v) {
  const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m256i ones = _mm256_set1_epi8(1);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock) {
    int8_t* q = row.q + block * row.q_step;
    const ptrdiff_t at = block * row.step;
    const __m512 v0 = _mm512_loadu_ps(x), v1 = _mm512_loadu_ps(x + 16);
    // Compared as integers, so that NaN and infinity win.
    const __m512i m0 = _mm512_and_si512(_mm512_castps_si512(v0), magnitude);
    const __m512i m1 = _mm512_and_si512(_mm512_castps_si512(v1), magnitude);
    const uint32_t bits = max_lanes(_mm512_max_epu32(m0, m1));
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      row.scale[at] = row.sum[at] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[at] = row.minus_halves[at] = 0;
      continue;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / amax);
    const __m128i b0 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v0, inverse)));
    const __m128i b1 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v1, inverse)));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(b0), b1, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, bytes);
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    const int32_t first = _mm256_extract_epi32(sums, 0), second = _mm256_extract_epi32(sums, 4);
    row.scale[at] = amax / 127.0f;
    row.sum[at] = row.scale[at] * static_cast<float>(first + second);
    row.minus_sum[at] = (-first - second) * row.sum_factor;
    row.minus_halves[at] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

LinearKernels make_kernels() {
  LinearKernels kernels{};
  kernels.quantize_row = quantize_row;
  kernels.grouped_from = kGroupedFrom;
  kernels.scaled_sums = true;
  kernels.task_rows = kAvx512TaskRows;
  kernels.strip_tiles = 2;
  kernels.task_row_bytes = 512 << 10;
  for (WeightKind kind : {WeightKind::f32, WeightKind::f16, WeightKind::bf16}) {
    kernels.tiles[static_cast<int>(kind)] = dense_tiles_avx512(kind);
  }
  set_block_kinds(kernels);
  set_int8(kernels, int8_kernels_avx512());
  return kernels;
}

}  // namespace

const LinearKernels& linear_kernels_avx512() {
  static const LinearKernels kernels = make_kernels();
  return kernels;
}

}  // namespace trireme
