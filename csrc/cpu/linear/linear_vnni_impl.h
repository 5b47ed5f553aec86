// Block kinds of linear.h with byte dot products (vpdpbusd): vectors of 16 lanes if the including file sets
// TRIREME_VNNI_LANES to 16 (AVX-512 VNNI), of 8 with 8 (AVX-VNNI). Included by linear_avx512.cpp, linear_avxvnni.cpp and
// linear_amx.cpp only; each has its own copy, so that the linker never shares such code with other files.
#pragma once

#include <immintrin.h>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"

namespace trireme {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int kLanes = TRIREME_VNNI_LANES;
constexpr int kHalves = kTileRows / kLanes;  // vectors per tile
constexpr size_t kVector = 4 * kLanes;       // bytes per vector

INLINE __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE __m256i load_32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// ---------------------------------------------------------------- vectors

#if TRIREME_VNNI_LANES == 16
using Ints = __m512i;
using Floats = __m512;

INLINE Ints load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void put(void* p, Ints v) { _mm512_storeu_si512(p, v); }
INLINE Ints every_byte(int v) { return _mm512_set1_epi8(static_cast<char>(v)); }
INLINE Ints every_int(int v) { return _mm512_set1_epi32(v); }
INLINE Ints no_ints() { return _mm512_setzero_si512(); }
INLINE Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
INLINE Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
INLINE Ints bit_xor(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
INLINE Ints left_16(Ints v, int n) { return _mm512_slli_epi16(v, n); }
INLINE Ints right_16(Ints v, int n) { return _mm512_srli_epi16(v, n); }
INLINE Ints left_32(Ints v, int n) { return _mm512_slli_epi32(v, n); }
INLINE Ints signed_right_32(Ints v, int n) { return _mm512_srai_epi32(v, n); }
INLINE Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
INLINE Ints mul_16(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
INLINE Ints madd_16(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
INLINE Ints add_32(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
INLINE Ints look_up(const int8_t* table, Ints v) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16(table)), v); }
INLINE Ints widen_signed_16(const uint8_t* p) { return _mm512_cvtepi8_epi16(load_32(p)); }
INLINE Ints widen_unsigned_16(const uint8_t* p) { return _mm512_cvtepu8_epi16(load_32(p)); }
INLINE Ints widen_unsigned_32(const uint8_t* p) { return _mm512_cvtepu8_epi32(load_16(p)); }
INLINE Ints widen_signed_32(const uint8_t* p) { return _mm512_cvtepi8_epi32(load_16(p)); }
INLINE Floats halfs(const uint8_t* p) { return _mm512_cvtph_ps(load_32(p)); }
INLINE Floats load_floats(const void* p) { return _mm512_loadu_ps(p); }
INLINE void put_floats(void* p, Floats v) { _mm512_storeu_ps(p, v); }
INLINE Floats every_float(float v) { return _mm512_set1_ps(v); }
INLINE Floats no_floats() { return _mm512_setzero_ps(); }
INLINE Floats floats(Ints v) { return _mm512_cvtepi32_ps(v); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats minus_fma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Ints dot_bytes(Ints acc, Ints codes, Ints x) { return _mm512_dpbusd_epi32(acc, codes, x); }
INLINE Floats exponents(const uint8_t* p) {  // see float_from_exponent
  const __m512i e = widen_unsigned_32(p);
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), normal, tiny));
}
#else
using Ints = __m256i;
using Floats = __m256;

INLINE __m128i load_8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
INLINE Ints load(const void* p) { return load_32(p); }
INLINE void put(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
INLINE Ints every_byte(int v) { return _mm256_set1_epi8(static_cast<char>(v)); }
INLINE Ints every_int(int v) { return _mm256_set1_epi32(v); }
INLINE Ints no_ints() { return _mm256_setzero_si256(); }
INLINE Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
INLINE Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
INLINE Ints bit_xor(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
INLINE Ints left_16(Ints v, int n) { return _mm256_slli_epi16(v, n); }
INLINE Ints right_16(Ints v, int n) { return _mm256_srli_epi16(v, n); }
INLINE Ints left_32(Ints v, int n) { return _mm256_slli_epi32(v, n); }
INLINE Ints signed_right_32(Ints v, int n) { return _mm256_srai_epi32(v, n); }
INLINE Ints sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
INLINE Ints mul_16(Ints a, Ints b) { return _mm256_mullo_epi16(a, b); }
INLINE Ints madd_16(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
INLINE Ints add_32(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints look_up(const int8_t* table, Ints v) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16(table)), v); }
INLINE Ints widen_signed_16(const uint8_t* p) { return _mm256_cvtepi8_epi16(load_16(p)); }
INLINE Ints widen_unsigned_16(const uint8_t* p) { return _mm256_cvtepu8_epi16(load_16(p)); }
INLINE Ints widen_unsigned_32(const uint8_t* p) { return _mm256_cvtepu8_epi32(load_8(p)); }
INLINE Ints widen_signed_32(const uint8_t* p) { return _mm256_cvtepi8_epi32(load_8(p)); }
INLINE Floats halfs(const uint8_t* p) { return _mm256_cvtph_ps(load_16(p)); }
INLINE Floats load_floats(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
INLINE void put_floats(void* p, Floats v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
INLINE Floats every_float(float v) { return _mm256_set1_ps(v); }
INLINE Floats no_floats() { return _mm256_setzero_ps(); }
INLINE Floats floats(Ints v) { return _mm256_cvtepi32_ps(v); }
INLINE Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats minus_fma(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE Ints dot_bytes(Ints acc, Ints codes, Ints x) { return _mm256_dpbusd_avx_epi32(acc, codes, x); }
INLINE Floats exponents(const uint8_t* p) {  // see float_from_exponent
  const __m256i e = widen_unsigned_32(p);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
#endif

// Forces the compiler to compute this value here: otherwise gcc reorders whole chains of multiplies and spills.
#if TRIREME_VNNI_LANES == 16
INLINE void pin(Ints& value) { asm("" : "+v"(value)); }
#else
INLINE void pin(Ints& value) { asm("" : "+x"(value)); }
#endif

// The same 4 activations in all lanes.
INLINE Ints every_quad(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return every_int(four);
}

// ---------------------------------------------------------------- codes and scales of a block

// Scales of a block for a vector of outputs.
struct Scales {
  Floats scale;
  Floats min;
  Floats first, second;  // types with pairs: the sub-scales of the first and the second 16 k's
  Ints pairs;            // the same as int16
  Ints min_pairs;        // both mins of the 16 k's as int16
};

template <WeightKind kind>
INLINE Scales load_scales(const uint8_t* header, const uint8_t* sub, int half) {
  constexpr ScaleForm form = block_form(kind).scale;
  Scales s{};
  const int lane = kLanes * half;
  if constexpr (form == ScaleForm::exponent) {
    s.scale = exponents(header + lane);
    return s;
  }
  s.scale = halfs(header + 2 * lane);
  if constexpr (has_mins(form)) s.min = halfs(header + 2 * kTileRows + 2 * lane);
  if constexpr (form == ScaleForm::super32) s.scale = mul(s.scale, floats(widen_signed_32(sub + lane)));
  if constexpr (form == ScaleForm::super32_min) {
    s.scale = mul(s.scale, floats(widen_unsigned_32(sub + lane)));
    s.min = mul(s.min, floats(widen_unsigned_32(sub + kTileRows + lane)));
  }
  if constexpr (has_pairs(form)) {
    if constexpr (form == ScaleForm::super16) {
      s.pairs = widen_signed_16(sub + 2 * lane);
    } else {
      const Ints both = widen_unsigned_16(sub + 2 * lane);
      s.pairs = bit_and(both, every_int(0x000f000f));
      s.min_pairs = right_16(both, 4);
    }
    s.first = floats(signed_right_32(left_32(s.pairs, 16), 16));
    s.second = floats(signed_right_32(s.pairs, 16));
  }
  return s;
}

// Extracts two quads of codes, as in the file (after the table, if any), from the planes.
template <WeightKind kind>
INLINE void unpack(const uint8_t* planes, int pair, int half, Ints& a, Ints& b) {
  constexpr BlockForm form = block_form(kind);
  planes += kVector * half;
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  if constexpr (form.first_bits == 8) {
    a = load(planes + 128 * pair);
    b = load(planes + 128 * pair + 64);
  } else if constexpr (form.first_bits == 4) {
    const Ints w = load(planes + 64 * pair), mask = every_byte(15);
    a = bit_and(w, mask);
    b = bit_and(right_16(w, 4), mask);
  } else {
    const Ints w = load(planes + 64 * (pair / 2)), mask = every_byte(3);
    a = bit_and(right_16(w, 4 * (pair % 2)), mask);
    b = bit_and(right_16(w, 4 * (pair % 2) + 2), mask);
  }
  if constexpr (form.second_bits == 1) {
    const Ints w = right_16(load(second), 2 * pair), bit = every_byte(1 << form.first_bits);
    a = bit_or(a, bit_and(left_16(w, form.first_bits), bit));
    b = bit_or(b, bit_and(left_16(w, form.first_bits - 1), bit));
  } else if constexpr (form.second_bits == 2) {
    const Ints w = right_16(load(second + 64 * (pair / 2)), 4 * (pair % 2)), bits = every_byte(0x30);
    a = bit_or(a, bit_and(left_16(w, 4), bits));
    b = bit_or(b, bit_and(left_16(w, 2), bits));
  }
  if constexpr (form.table != nullptr) {
    a = look_up(form.table, a);
    b = look_up(form.table, b);
  }
}

// Offset to subtract from the unsigned codes of a dot product: signed bytes get 128 added.
constexpr int offset_of(BlockForm form) { return form.max_code == 0 ? 128 : form.offset; }

template <WeightKind kind>
INLINE Ints unsigned_codes(Ints codes) {
  return block_form(kind).max_code == 0 ? bit_xor(codes, every_byte(0x80)) : codes;
}

// ---------------------------------------------------------------- panels

// A panel holds the results of load_scales and unpack for some blocks of a tile, computed once for large M:
//     scale | min (types with mins) | min_pairs (Q2_K) | first, second (Q6_K) | 8 quads of codes
// Codes of Q2_K and Q3_K are multiplied by their sub-scales, which leaves one sum per block: 3 * 15 fits a byte, and so does
// minus the product of -4..3 and -32..31; Q3_K's scale changes sign with it.
constexpr bool keeps_pairs(WeightKind kind) { return kind == WeightKind::q6_k; }
constexpr bool is_negated(WeightKind kind) { return kind == WeightKind::q3_k; }
constexpr int panel_offset(WeightKind kind) { return is_negated(kind) ? 128 : offset_of(block_form(kind)); }

constexpr size_t panel_codes_at(WeightKind kind) {
  const ScaleForm form = block_form(kind).scale;
  return kVector * (1 + (has_mins(form) ? 1 : 0) + (form == ScaleForm::super16_min ? 1 : 0) + (keeps_pairs(kind) ? 2 : 0));
}

constexpr size_t panel_step(WeightKind kind) { return panel_codes_at(kind) + 8 * kVector; }

constexpr int kPanelBlocks = 20;

// Blocks of the next panel: the panels of a tile are about equally long.
INLINE int panel_blocks(int blocks_left) {
  const int panels = (blocks_left + kPanelBlocks - 1) / kPanelBlocks;
  return (blocks_left + panels - 1) / panels;
}

// Prefetches the output cache lines of some rows of x for a tile.
INLINE void fetch_output(const TileArgs& args, int row, int rows, int tile, int cols) {
  const float* out = args.out + row * args.out_stride + tile * kTileRows;
  for (int r = 0; r < rows; ++r, out += args.out_stride) {
    for (int c = 0; c < cols; c += kTileRows) asm volatile("prefetchw %0" ::"m"(out[c]));
  }
}

// The low bytes of codes times the int16 in `scale`, whose halves are equal.
INLINE Ints multiply_bytes(Ints codes, Ints scale) {
  const Ints even = bit_and(mul_16(codes, scale), every_int(0x00ff00ff));
  return bit_or(even, left_16(mul_16(right_16(codes, 8), scale), 8));
}

// Unpacks to plain bytes (AMX tiles) or bytes plus panel_offset (byte dot products).
template <WeightKind kind, bool is_signed>
INLINE Ints panel_codes(Ints codes, Ints pair_scale) {
  constexpr BlockForm form = block_form(kind);
  if constexpr (kind == WeightKind::q2_k) return multiply_bytes(codes, pair_scale);
  if constexpr (is_negated(kind)) {
    const Ints product = multiply_bytes(sub_bytes(every_byte(form.offset), codes), pair_scale);
    return is_signed ? product : bit_xor(product, every_byte(0x80));
  }
  if constexpr (form.max_code == 0) return is_signed ? codes : bit_xor(codes, every_byte(0x80));
  if constexpr (form.offset == 0 || !is_signed) return codes;
  return sub_bytes(codes, every_byte(form.offset));
}

template <WeightKind kind, bool is_signed>
INLINE void write_panel_block(const uint8_t* header, const uint8_t* sub, int half, uint8_t* p) {
  constexpr ScaleForm form = block_form(kind).scale;
  const Scales s = load_scales<kind>(header, sub, half);
  uint8_t* codes = p + panel_codes_at(kind);
  put_floats(p, is_negated(kind) ? mul(s.scale, every_float(-1.0f)) : s.scale);
  p += kVector;
  if constexpr (has_mins(form)) {
    put_floats(p, s.min);
    p += kVector;
  }
  if constexpr (form == ScaleForm::super16_min) put(p, s.min_pairs);
  Ints first{}, second{};
  if constexpr (keeps_pairs(kind)) {
    put_floats(p, s.first);
    put_floats(p + kVector, s.second);
  } else if constexpr (has_pairs(form)) {
    const Ints low = every_int(0xffff);
    first = bit_or(bit_and(s.pairs, low), left_32(s.pairs, 16));
    second = bit_or(bit_xor(s.pairs, bit_and(s.pairs, low)), bit_and(signed_right_32(s.pairs, 16), low));
  }
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    Ints a, b;
    unpack<kind>(sub + sub_scale_bytes(form), pair, half, a, b);
    put(codes + 2 * pair * kVector, panel_codes<kind, is_signed>(a, pair < 2 ? first : second));
    put(codes + (2 * pair + 1) * kVector, panel_codes<kind, is_signed>(b, pair < 2 ? first : second));
  }
}

// Blocks [first, first + count) of one vector of a tile.
template <WeightKind kind, bool is_signed>
__attribute__((noinline)) void write_panel(const uint8_t* tile, int half, int first, int count, uint8_t* panel, size_t step) {
  constexpr int per_group = block_form(kind).raw_values / kBlock;
  for (int i = 0; i < count; ++i) {
    const uint8_t* header = tile + (first + i) / per_group * packed_group_bytes(kind);
    const uint8_t* block = header + header_bytes(block_form(kind).scale) + (first + i) % per_group * packed_block_bytes(kind);
    _mm_prefetch(reinterpret_cast<const char*>(block) + 4096, _MM_HINT_T0);
    write_panel_block<kind, is_signed>(header, block, half, panel + i * step);
  }
}

// Contribution of a block to one row of x: `total` is the exact integer dot product, including sub-scales of 16 k's.
template <WeightKind kind>
INLINE Floats add_block(Floats acc, Floats total, const Scales& s, float x_scale, float x_sum, int32_t minus_halves) {
  constexpr ScaleForm form = block_form(kind).scale;
  acc = fma(total, mul(s.scale, every_float(x_scale)), acc);
  if constexpr (form == ScaleForm::half_min) acc = fma(s.min, every_float(x_sum), acc);
  if constexpr (form == ScaleForm::super32_min) acc = minus_fma(s.min, every_float(x_sum), acc);
  if constexpr (form == ScaleForm::super16_min) {
    const Ints sums = madd_16(s.min_pairs, every_int(minus_halves));
    acc = fma(floats(sums), mul(s.min, every_float(x_scale)), acc);
  }
  return acc;
}

// Calls visit.template operator()<kind>() for every block kind.
template <class Visit>
INLINE void for_block_kinds(Visit&& visit) {
  [&]<WeightKind... kinds>() {
    (visit.template operator()<kinds>(), ...);
  }.template operator()<WeightKind::q8_0, WeightKind::q4_0, WeightKind::q4_1, WeightKind::q5_0, WeightKind::q5_1, WeightKind::q2_k, WeightKind::q3_k,
                        WeightKind::q4_k, WeightKind::q5_k, WeightKind::q6_k, WeightKind::iq4_nl, WeightKind::iq4_xs, WeightKind::mxfp4>();
}

}  // namespace
}  // namespace trireme
