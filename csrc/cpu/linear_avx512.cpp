// Kernels of linear.h for AVX-512 F/BW/VL/DQ/VNNI. Compiled with those flags: nothing here may be an inline function
// with external linkage, or the linker could keep this copy of it for machines without AVX-512.
#include <immintrin.h>

#include "halfs.h"
#include "linear.h"
#include "linear_store_avx512.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- activations

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  int8_t* q = row.q;
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    const __m512 v0 = _mm512_loadu_ps(x), v1 = _mm512_loadu_ps(x + 16);
    // Compared as integers, so that NaN and infinity win.
    const __m512i m0 = _mm512_and_si512(_mm512_castps_si512(v0), magnitude);
    const __m512i m1 = _mm512_and_si512(_mm512_castps_si512(v1), magnitude);
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(m0, m1));
    const float amax = float_from_bits(bits);
    if (bits >= 0x7f800000u || amax < 1e-30f) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_setzero_si256());
      row.scale[block] = row.sum[block] = bits >= 0x7f800000u ? __builtin_nanf("") : 0.0f;
      row.minus_sum[block] = row.minus_halves[block] = 0;
      continue;
    }
    const __m512 inverse = _mm512_set1_ps(127.0f / amax);
    const __m512i w0 = _mm512_cvtps_epi32(_mm512_mul_ps(v0, inverse));
    const __m512i w1 = _mm512_cvtps_epi32(_mm512_mul_ps(v1, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(w0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(w1));
    const int32_t first = _mm512_reduce_add_epi32(w0), second = _mm512_reduce_add_epi32(w1);
    row.scale[block] = amax / 127.0f;
    row.sum[block] = row.scale[block] * static_cast<float>(first + second);
    row.minus_sum[block] = -first - second;
    row.minus_halves[block] = static_cast<int32_t>((static_cast<uint32_t>(-first) & 0xffffu) | static_cast<uint32_t>(-second) << 16);
  }
}

// ---------------------------------------------------------------- block kinds

#define INLINE inline __attribute__((always_inline))

struct Four {
  int8_t values[4];
};

INLINE __m512i load(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE __m512 load_halfs(const uint8_t* p) { return _mm512_cvtph_ps(load_32(p)); }
INLINE __m512 load_unsigned(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16(p))); }
INLINE __m512 load_signed(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(p))); }

INLINE __m512 load_exponents(const uint8_t* p) {  // see float_from_exponent
  const __m512i e = _mm512_cvtepu8_epi32(load_16(p));
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), normal, tiny));
}

// acc + products of w (unsigned) with 4 activations, the same for all 16 lanes. gcc does not fold the broadcast into the
// instruction by itself, and an asm keeps it from moving whole chains of products behind each other.
INLINE void add_products(__m512i& acc, __m512i w, const int8_t* q) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*reinterpret_cast<const Four*>(q)));
}

// What a tile has beside the codes of a block.
struct Scales {
  __m512 scale;
  __m512 min;
  __m512 first, second;  // types with pairs: the sub-scales of the first and the second 16 k's
  __m512i min_pairs;     // both mins of the 16 k's as int16
};

template <WeightKind kind>
INLINE Scales load_scales(const uint8_t* header, const uint8_t* sub) {
  constexpr ScaleForm form = block_form(kind).scale;
  Scales s{};
  if constexpr (form == ScaleForm::exponent) {
    s.scale = load_exponents(header);
    return s;
  }
  s.scale = load_halfs(header);
  if constexpr (has_mins(form)) s.min = load_halfs(header + 2 * kTileRows);
  if constexpr (form == ScaleForm::super32) s.scale = _mm512_mul_ps(s.scale, load_signed(sub));
  if constexpr (form == ScaleForm::super32_min) {
    s.scale = _mm512_mul_ps(s.scale, load_unsigned(sub));
    s.min = _mm512_mul_ps(s.min, load_unsigned(sub + kTileRows));
  }
  if constexpr (has_pairs(form)) {
    __m512i pairs;
    if constexpr (form == ScaleForm::super16) {
      pairs = _mm512_cvtepi8_epi16(load_32(sub));
    } else {
      const __m512i both = _mm512_cvtepu8_epi16(load_32(sub));
      pairs = _mm512_and_si512(both, _mm512_set1_epi16(15));
      s.min_pairs = _mm512_srli_epi16(both, 4);
    }
    s.first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16));
    s.second = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16));
  }
  return s;
}

// What is taken off the unsigned codes that unpack gives: signed bytes get 128 added.
constexpr int offset_of(BlockForm form) { return form.max_code == 0 ? 128 : form.offset; }

// Two quads of unsigned codes out of the planes.
template <WeightKind kind>
INLINE void unpack(const uint8_t* planes, int pair, __m512i& a, __m512i& b) {
  constexpr BlockForm form = block_form(kind);
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  if constexpr (form.first_bits == 8) {
    a = load(planes + 128 * pair);
    b = load(planes + 128 * pair + 64);
  } else if constexpr (form.first_bits == 4) {
    const __m512i w = load(planes + 64 * pair), mask = _mm512_set1_epi8(15);
    a = _mm512_and_si512(w, mask);
    b = _mm512_and_si512(_mm512_srli_epi16(w, 4), mask);
  } else {
    const __m512i w = load(planes + 64 * (pair / 2)), mask = _mm512_set1_epi8(3);
    a = _mm512_and_si512(_mm512_srli_epi16(w, 4 * (pair % 2)), mask);
    b = _mm512_and_si512(_mm512_srli_epi16(w, 4 * (pair % 2) + 2), mask);
  }
  if constexpr (form.second_bits == 1) {
    const __m512i w = _mm512_srli_epi16(load(second), 2 * pair), bit = _mm512_set1_epi8(1 << form.first_bits);
    a = _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(w, form.first_bits), bit));
    b = _mm512_or_si512(b, _mm512_and_si512(_mm512_slli_epi16(w, form.first_bits - 1), bit));
  } else if constexpr (form.second_bits == 2) {
    const __m512i w = _mm512_srli_epi16(load(second + 64 * (pair / 2)), 4 * (pair % 2)), bits = _mm512_set1_epi8(0x30);
    a = _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(w, 4), bits));
    b = _mm512_or_si512(b, _mm512_and_si512(_mm512_slli_epi16(w, 2), bits));
  }
  if constexpr (form.table != nullptr) {
    const __m512i table = _mm512_broadcast_i32x4(load_16(reinterpret_cast<const uint8_t*>(form.table)));
    a = _mm512_shuffle_epi8(table, a);
    b = _mm512_shuffle_epi8(table, b);
  }
  if constexpr (form.max_code == 0) {
    const __m512i high_bit = _mm512_set1_epi8(static_cast<char>(0x80));
    a = _mm512_xor_si512(a, high_bit);
    b = _mm512_xor_si512(b, high_bit);
  }
}

// dot[r][half]: exact integer products of each 16 k's of one block with R rows of activations, offset taken off. Types
// without pairs use dot[r][0] alone, but for one row, where two sums run side by side.
template <WeightKind kind, int R>
INLINE void dot_block(const uint8_t* planes, const int8_t* q, ptrdiff_t q_stride, const QuantizedRows& rows, size_t at,
                      size_t num_blocks, __m512i (*dot)[2]) {
  constexpr BlockForm form = block_form(kind);
  constexpr bool pairs = has_pairs(form.scale);
  constexpr int offset = offset_of(form);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const size_t i = at + r * num_blocks;
    dot[r][0] = dot[r][1] = _mm512_setzero_si512();
    if constexpr (offset != 0 && pairs) {
      const __m512i halves = _mm512_set1_epi32(rows.minus_halves[i]);
      dot[r][0] = _mm512_slli_epi32(_mm512_srai_epi32(_mm512_slli_epi32(halves, 16), 16), __builtin_ctz(offset));
      dot[r][1] = _mm512_slli_epi32(_mm512_srai_epi32(halves, 16), __builtin_ctz(offset));
    } else if constexpr (offset != 0) {
      dot[r][0] = _mm512_set1_epi32(rows.minus_sum[i] * offset);
    }
  }
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    __m512i a, b;
    unpack<kind>(planes, pair, a, b);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int8_t* x = q + r * q_stride + pair * 8;
      add_products(dot[r][pairs ? pair / 2 : 0], a, x);
      add_products(dot[r][pairs ? pair / 2 : R == 1 ? 1 : 0], b, x + 4);
    }
  }
  if constexpr (R == 1 && !pairs) dot[0][0] = _mm512_add_epi32(dot[0][0], dot[0][1]);
}

// What a block adds to one row. Products of 16 k's times sub-scales stay below 2^24, so float sums of them are exact.
template <WeightKind kind>
INLINE __m512 add_block(__m512 acc, const __m512i (&dot)[2], const Scales& s, const QuantizedRows& rows, size_t at) {
  constexpr ScaleForm form = block_form(kind).scale;
  const __m512 x_scale = _mm512_set1_ps(rows.scale[at]);
  __m512 total = _mm512_cvtepi32_ps(dot[0]);
  if constexpr (has_pairs(form)) {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[1]), s.second, _mm512_mul_ps(total, s.first));
  }
  acc = _mm512_fmadd_ps(total, _mm512_mul_ps(s.scale, x_scale), acc);
  if constexpr (form == ScaleForm::half_min) acc = _mm512_fmadd_ps(s.min, _mm512_set1_ps(rows.sum[at]), acc);
  if constexpr (form == ScaleForm::super32_min) acc = _mm512_fnmadd_ps(s.min, _mm512_set1_ps(rows.sum[at]), acc);
  if constexpr (form == ScaleForm::super16_min) {
    const __m512i sums = _mm512_madd_epi16(s.min_pairs, _mm512_set1_epi32(rows.minus_halves[at]));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_mul_ps(s.min, x_scale), acc);
  }
  return acc;
}

// R rows with a tile. Meanwhile fetches what lies `ahead` bytes further (0: nothing).
template <WeightKind kind, int R>
void block_rows(const TileArgs& args, int tile, int first_row, size_t ahead) {
  constexpr BlockForm form = block_form(kind);
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int per_group = form.raw_values / kBlock;
  const size_t num_blocks = static_cast<size_t>(args.k) / kBlock;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = args.rows.q + first_row * static_cast<ptrdiff_t>(args.k);
  size_t at = first_row * num_blocks;
  __m512 acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
  for (size_t group = 0; group < num_blocks / per_group; ++group) {
    const uint8_t* header = packed;
    packed += header_bytes(form.scale);
    for (int block = 0; block < per_group; ++block, packed += step, q += kBlock, ++at) {
      if (ahead != 0) {
        const char* next = reinterpret_cast<const char*>(packed) + ahead;
        for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
      }
      __m512i dot[R][2];
      dot_block<kind, R>(packed + sub_scale_bytes(form.scale), q, args.k, args.rows, at, num_blocks, dot);
      const Scales s = load_scales<kind>(header, packed);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r] = add_block<kind>(acc[r], dot[r], s, args.rows, at + r * num_blocks);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(args, first_row + r, tile, acc[r]);
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  // One row streams through the weights; more rows stay on a tile while the first of them fetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    int row = 0;
    for (; row + 8 <= args.m; row += 8) block_rows<kind, 8>(args, tile, row, row == 0 ? ahead : 0);
    switch (args.m - row) {
      case 7: block_rows<kind, 7>(args, tile, row, row == 0 ? ahead : 0); break;
      case 6: block_rows<kind, 6>(args, tile, row, row == 0 ? ahead : 0); break;
      case 5: block_rows<kind, 5>(args, tile, row, row == 0 ? ahead : 0); break;
      case 4: block_rows<kind, 4>(args, tile, row, row == 0 ? ahead : 0); break;
      case 3: block_rows<kind, 3>(args, tile, row, row == 0 ? ahead : 0); break;
      case 2: block_rows<kind, 2>(args, tile, row, row == 0 ? ahead : 0); break;
      case 1: block_rows<kind, 1>(args, tile, row, row == 0 ? ahead : 0); break;
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx512() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles_avx512(WeightKind::f32), dense_tiles_avx512(WeightKind::f16), dense_tiles_avx512(WeightKind::bf16),
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>,
       block_tiles<WeightKind::q5_0>, block_tiles<WeightKind::q5_1>, block_tiles<WeightKind::q2_k>,
       block_tiles<WeightKind::q3_k>, block_tiles<WeightKind::q4_k>, block_tiles<WeightKind::q5_k>,
       block_tiles<WeightKind::q6_k>, block_tiles<WeightKind::iq4_nl>, block_tiles<WeightKind::iq4_xs>,
       block_tiles<WeightKind::mxfp4>},
  };
  return kernels;
}

}  // namespace trireme
