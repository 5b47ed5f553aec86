// Shared by linear_*_avx2.cpp: GEMMs with block kinds for AVX2 + FMA + F16C. All in an anonymous namespace: the linker must
// never share AVX2 code with other files.
//
// Small M streams through a tile in memory; large M, grouped by kGroupRows rows of x, first unpacks it into a panel that stays in
// L1. Both do the same operations in the same order.
#pragma once

#include <immintrin.h>

#include "cpu/halfs.h"
#include "cpu/linear/linear.h"
#include "cpu/linear/linear_store_avx2.h"

namespace trireme {
namespace {

#define INLINE inline __attribute__((always_inline))

// Forces the compiler to compute this value here. Otherwise gcc moves all additions of a block after all its multiplies and
// spills them: measured 100 against 220 GOP/s.
INLINE void pin(__m256i& value) { asm("" : "+x"(value)); }

INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256 load_floats(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
INLINE __m256 load_halfs(const uint8_t* p) { return _mm256_cvtph_ps(load_16(p)); }
INLINE __m128i load_8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
INLINE __m256 load_unsigned(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p))); }
INLINE __m256 load_signed(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p))); }

// The same 4 activations in all 8 lanes.
INLINE __m256i broadcast4(const int8_t* q) {
  int32_t four;
  __builtin_memcpy(&four, q, 4);
  return _mm256_set1_epi32(four);
}

INLINE __m256 load_exponents(const uint8_t* p) {  // see float_from_exponent
  const __m256i e = _mm256_cvtepu8_epi32(load_8(p));
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}

// How the codes of a kind are multiplied, independent of its planes: kinds of one form share their panel kernels.
struct ProductForm {
  int chain;    // quads whose dot products accumulate in 16 bits; 0: signed bytes, multiplied as int16 in a panel
  int offset;   // see BlockForm
  bool mins;    // a min per 32 k's
  bool pairs;   // sub-scales per 16 k's ...
  bool min_pairs;  // ... and mins
};

constexpr ProductForm product_form(WeightKind kind) {
  const BlockForm form = block_form(kind);
  const bool pairs = has_pairs(form.scale), min_pairs = form.scale == ScaleForm::super16_min;
  if (form.max_code == 0) return {0, 0, false, false, false};
  const int most = 32767 / (2 * 127 * form.max_code);  // two multiplies per lane, activations up to 127
  const int chain = most >= 8 && !pairs ? 8 : most >= 4 ? 4 : 2;
  return {chain, form.offset, has_mins(form.scale) && !min_pairs, pairs, min_pairs};
}

// Scales of a block for one half (8 lanes) of a tile.
struct Scales {
  __m256 scale;
  __m256 min;             // a block's contribution per sum of activations, including its sign
  __m256i first, second;  // kinds with pairs: the sub-scale of the first or second 16 k's, twice as int16
  __m256i pairs;          // both of them as int16, times the offset
  __m256i min_pairs;
};

INLINE void widen_pairs(Scales& s, __m256i pairs, int offset) {
  s.pairs = offset == 0 ? pairs : _mm256_slli_epi16(pairs, __builtin_ctz(offset));
  s.first = _mm256_or_si256(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(pairs, 16));
  s.second = _mm256_or_si256(_mm256_srli_epi32(pairs, 16), _mm256_andnot_si256(_mm256_set1_epi32(0xffff), pairs));
}

template <WeightKind kind>
INLINE Scales load_scales(const uint8_t* header, const uint8_t* sub, int half) {
  constexpr BlockForm block = block_form(kind);
  constexpr ScaleForm form = block.scale;
  Scales s{};
  if constexpr (form == ScaleForm::exponent) {
    s.scale = load_exponents(header + 8 * half);
    return s;
  }
  s.scale = load_halfs(header + 16 * half);
  if constexpr (has_mins(form)) s.min = load_halfs(header + 2 * kTileRows + 16 * half);
  if constexpr (form == ScaleForm::super32) s.scale = _mm256_mul_ps(s.scale, load_signed(sub + 8 * half));
  if constexpr (form == ScaleForm::super32_min) {
    s.scale = _mm256_mul_ps(s.scale, load_unsigned(sub + 8 * half));
    s.min = _mm256_mul_ps(s.min, load_unsigned(sub + kTileRows + 8 * half));
    s.min = _mm256_xor_ps(s.min, _mm256_set1_ps(-0.0f));
  }
  if constexpr (form == ScaleForm::super16) widen_pairs(s, _mm256_cvtepi8_epi16(load_16(sub + 16 * half)), block.offset);
  if constexpr (form == ScaleForm::super16_min) {
    const __m256i both = _mm256_cvtepu8_epi16(load_16(sub + 16 * half));
    widen_pairs(s, _mm256_and_si256(both, _mm256_set1_epi16(15)), block.offset);
    s.min_pairs = _mm256_srli_epi16(both, 4);
  }
  return s;
}

// Extracts a quad of codes (8 lanes) from the planes.
template <WeightKind kind>
INLINE __m256i unpack(const uint8_t* planes, int quad, int half) {
  constexpr BlockForm form = block_form(kind);
  planes += 32 * half;
  if constexpr (form.first_bits == 8) return load(planes + 64 * quad);
  constexpr int per_piece = 8 / form.first_bits;
  const __m256i w = load(planes + 64 * (quad / per_piece));
  const __m256i field = _mm256_srli_epi16(w, form.first_bits * (quad % per_piece));
  __m256i codes = _mm256_and_si256(field, _mm256_set1_epi8((1 << form.first_bits) - 1));
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  if constexpr (form.second_bits == 1) {
    const int shift = quad - form.first_bits;  // to the right
    const __m256i plane = load(second);
    const __m256i moved = shift >= 0 ? _mm256_srli_epi16(plane, shift) : _mm256_slli_epi16(plane, -shift);
    codes = _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(1 << form.first_bits)));
  } else if constexpr (form.second_bits == 2) {
    const int shift = 2 * (quad % 4) - 4;
    const __m256i plane = load(second + 64 * (quad / 4));
    const __m256i moved = shift >= 0 ? _mm256_srli_epi16(plane, shift) : _mm256_slli_epi16(plane, -shift);
    codes = _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }
  if constexpr (form.table != nullptr) {
    const __m256i table = _mm256_broadcastsi128_si256(load_16(reinterpret_cast<const uint8_t*>(form.table)));
    codes = _mm256_shuffle_epi8(table, codes);
  }
  return codes;
}

// Quads of codes from the planes of a tile.
template <WeightKind kind>
struct PackedCodes {
  const uint8_t* planes;
  INLINE __m256i read(int quad, int half) const { return unpack<kind>(planes, quad, half); }
};

// Quads of codes from a panel.
struct PanelCodes {
  const uint8_t* quads;
  INLINE __m256i read(int quad, int half) const { return load(quads + 64 * quad + 32 * half); }
};

// ---------------------------------------------------------------- dot products of one block with R rows of activations

// dot[r][half]: exact integer dot products (q: rows of x, q_stride apart), times the sub-scales of 16 k's if there are any.
// The offset is not yet subtracted.
template <ProductForm form, int R, class Codes>
INLINE void dot_unsigned(const Codes& codes, const Scales (&s)[2], const int8_t* q, ptrdiff_t q_stride, __m256i (*dot)[2]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i acc[R][2];
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const __m256i w[2] = {codes.read(quad, 0), codes.read(quad, 1)};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(q + r * q_stride + quad * 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i product = _mm256_maddubs_epi16(w[half], x);
        acc[r][half] = quad % form.chain == 0 ? product : _mm256_add_epi16(acc[r][half], product);
        pin(acc[r][half]);
        if ((quad + 1) % form.chain == 0) {
          const __m256i factor = !form.pairs ? ones : quad < 4 ? s[half].first : s[half].second;
          const __m256i sum = _mm256_madd_epi16(acc[r][half], factor);
          dot[r][half] = quad + 1 == form.chain ? sum : _mm256_add_epi32(dot[r][half], sum);
          pin(dot[r][half]);
        }
      }
    }
  }
}

// |w| times x with the sign of w: a pair is at most 2 * 128 * 127 = 32512, which fits 16 bits, but two pairs do not.
template <int R, class Codes>
INLINE void dot_signed(const Codes& codes, const int8_t* q, ptrdiff_t q_stride, __m256i (*dot)[2]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const __m256i w[2] = {codes.read(quad, 0), codes.read(quad, 1)};
    const __m256i magnitude[2] = {_mm256_abs_epi8(w[0]), _mm256_abs_epi8(w[1])};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i x = broadcast4(q + r * q_stride + quad * 4);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i product = _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, w[half]));
        const __m256i sum = _mm256_madd_epi16(product, ones);
        dot[r][half] = quad == 0 ? sum : _mm256_add_epi32(dot[r][half], sum);
        pin(dot[r][half]);
      }
    }
  }
}

// Codes and activations as int16: twice the bytes, but one multiply and one add for two k's.
template <int R>
INLINE void dot_wide(const uint8_t* codes, const int16_t* x, ptrdiff_t x_stride, __m256i (*dot)[2]) {
#pragma GCC unroll 16
  for (int two = 0; two < kBlock / 2; ++two) {
    const __m256i w0 = load(codes + 64 * two), w1 = load(codes + 64 * two + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256i both = broadcast4(reinterpret_cast<const int8_t*>(x + r * x_stride + 2 * two));
      const __m256i s0 = _mm256_madd_epi16(w0, both), s1 = _mm256_madd_epi16(w1, both);
      dot[r][0] = two == 0 ? s0 : _mm256_add_epi32(dot[r][0], s0);
      pin(dot[r][0]);
      dot[r][1] = two == 0 ? s1 : _mm256_add_epi32(dot[r][1], s1);
      pin(dot[r][1]);
    }
  }
}

// Scale and sums of a block of a row of activations; see QuantizedRows.
struct RowBlock {
  const float* scale;
  const float* sum;
  const int32_t* minus_sum;
  const int32_t* minus_halves;
};

// In all lanes. Written so that it compiles to one load.
INLINE __m256i repeat(const int32_t* value) { return broadcast4(reinterpret_cast<const int8_t*>(value)); }

template <ProductForm form>
INLINE __m256i take_offset(__m256i dot, const Scales& s, const RowBlock& x) {
  if constexpr (form.offset == 0) return dot;
  if constexpr (form.pairs) return _mm256_add_epi32(dot, _mm256_madd_epi16(s.pairs, repeat(x.minus_halves)));
  return _mm256_add_epi32(dot, repeat(x.minus_sum));
}

// Contribution of a block to the 8 lanes of one row of x.
template <ProductForm form>
INLINE __m256 add_block(__m256 acc, __m256i dot, const Scales& s, const RowBlock& x) {
  const __m256 x_scale = _mm256_broadcast_ss(x.scale);
  dot = take_offset<form>(dot, s, x);
  acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(s.scale, x_scale), acc);
  if constexpr (form.mins) acc = _mm256_fmadd_ps(s.min, _mm256_broadcast_ss(x.sum), acc);
  if constexpr (form.min_pairs) {
    const __m256i sums = _mm256_madd_epi16(s.min_pairs, repeat(x.minus_halves));
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_mul_ps(s.min, x_scale), acc);
  }
  return acc;
}

// Of R rows, `stride` apart.
template <ProductForm form, int R>
INLINE void add_blocks(const __m256i (*dot)[2], const Scales (&s)[2], const RowBlock& first, size_t stride, __m256 (*acc)[2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const size_t at = r * stride;
    const RowBlock x{first.scale + at, first.sum + at, first.minus_sum + at, first.minus_halves + at};
    acc[r][0] = add_block<form>(acc[r][0], dot[r][0], s[0], x);
    acc[r][1] = add_block<form>(acc[r][1], dot[r][1], s[1], x);
  }
}

// ---------------------------------------------------------------- small M: straight from a tile in memory

// R rows of x with a tile. Prefetches `ahead` bytes further (0: nothing).
template <WeightKind kind, int R>
__attribute__((noinline)) void stream_rows(const TileArgs& args, int tile, int first_row, size_t ahead) {
  constexpr BlockForm form = block_form(kind);
  constexpr ProductForm product = product_form(kind);
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int per_group = form.raw_values / kBlock;
  const int num_blocks = args.k / kBlock;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = args.rows.q + first_row * static_cast<ptrdiff_t>(args.k);
  size_t at = static_cast<size_t>(first_row) * num_blocks;
  __m256 acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int group = 0; group < num_blocks / per_group; ++group) {
    const uint8_t* header = packed;
    packed += header_bytes(form.scale);
    for (int block = 0; block < per_group; ++block, packed += step, q += kBlock, ++at) {
      if (ahead != 0) {
        const char* next = reinterpret_cast<const char*>(packed) + ahead;
        for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
      }
      const Scales s[2] = {load_scales<kind>(header, packed, 0), load_scales<kind>(header, packed, 1)};
      const PackedCodes<kind> codes{packed + sub_scale_bytes(form.scale)};
      __m256i dot[R][2];
      if constexpr (product.chain == 0) {
        dot_signed<R>(codes, q, args.k, dot);
      } else {
        dot_unsigned<product, R>(codes, s, q, args.k, dot);
      }
      const QuantizedRows& rows = args.rows;
      const RowBlock x{rows.scale + at, rows.sum + at, rows.minus_sum + at, rows.minus_halves + at};
      add_blocks<product, R>(dot, s, x, num_blocks, acc);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(args, first_row + r, tile, acc[r][0], acc[r][1]);
}

template <WeightKind kind>
void stream_tile(const TileArgs& args, int tile) {
  // A single row streams through the weights; more rows stay on a tile while the first of them prefetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  int row = 0;
  for (; row + 4 <= args.m; row += 4) stream_rows<kind, 4>(args, tile, row, row == 0 ? ahead : 0);
  switch (args.m - row) {
    case 3: stream_rows<kind, 3>(args, tile, row, row == 0 ? ahead : 0); break;
    case 2: stream_rows<kind, 2>(args, tile, row, row == 0 ? ahead : 0); break;
    case 1: stream_rows<kind, 1>(args, tile, row, row == 0 ? ahead : 0); break;
  }
}

// ---------------------------------------------------------------- large M: a tile unpacked into a panel

// A block in a panel: its Scales, then the 8 quads of codes, each of 16 lanes; or, for signed kinds, 16 pairs as int16.
constexpr size_t kVector = 4 * kTileRows;  // 16 lanes of 4 bytes
constexpr size_t kPanelBytes = 20u << 10;  // leaves the rest of L1 to the rows of x

constexpr size_t panel_scale_bytes(ProductForm form) {
  return kVector * (1 + (form.mins || form.min_pairs ? 1 : 0) + (form.pairs ? 3 : 0) + (form.min_pairs ? 1 : 0));
}

constexpr size_t panel_step(ProductForm form) {
  return panel_scale_bytes(form) + static_cast<size_t>(form.chain == 0 ? 2 : 1) * kBlock * kTileRows;
}

INLINE void put(uint8_t*& p, __m256i value) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(p), value);
  p += kVector;
}

// 4 codes per lane as two pairs of int16 per lane.
INLINE void put_wide(uint8_t*& p, __m256i codes) {
  const __m256i low = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
  const __m256i high = _mm256_or_si256(low, _mm256_set1_epi16(0x0200));
  put(p, _mm256_srai_epi16(_mm256_shuffle_epi8(codes, low), 8));
  put(p, _mm256_srai_epi16(_mm256_shuffle_epi8(codes, high), 8));
}

template <WeightKind kind>
INLINE void write_panel_block(const uint8_t* header, const uint8_t* sub, uint8_t* panel) {
  constexpr ProductForm form = product_form(kind);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    uint8_t* p = panel + 32 * half;
    const Scales s = load_scales<kind>(header, sub, half);
    put(p, _mm256_castps_si256(s.scale));
    if constexpr (form.mins || form.min_pairs) put(p, _mm256_castps_si256(s.min));
    if constexpr (form.pairs) {
      put(p, s.first);
      put(p, s.second);
      put(p, s.pairs);
    }
    if constexpr (form.min_pairs) put(p, s.min_pairs);
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m256i codes = unpack<kind>(sub + sub_scale_bytes(block_form(kind).scale), quad, half);
      if constexpr (form.chain == 0) {
        put_wide(p, codes);
      } else {
        put(p, codes);
      }
    }
  }
}

// Blocks [first, first + count) of a tile.
template <WeightKind kind>
__attribute__((noinline)) void write_panel(const uint8_t* tile, int first, int count, uint8_t* panel) {
  constexpr int per_group = block_form(kind).raw_values / kBlock;
  for (int i = 0; i < count; ++i) {
    const uint8_t* header = tile + (first + i) / per_group * packed_group_bytes(kind);
    const uint8_t* block = header + header_bytes(block_form(kind).scale) + (first + i) % per_group * packed_block_bytes(kind);
    write_panel_block<kind>(header, block, panel + i * panel_step(product_form(kind)));
  }
}

template <ProductForm form>
INLINE Scales load_panel_scales(const uint8_t* p, int half) {
  Scales s{};
  p += 32 * half;
  s.scale = load_floats(p);
  p += kVector;
  if constexpr (form.mins || form.min_pairs) {
    s.min = load_floats(p);
    p += kVector;
  }
  if constexpr (form.pairs) {
    s.first = load(p);
    s.second = load(p + kVector);
    s.pairs = load(p + 2 * kVector);
  }
  if constexpr (form.min_pairs) s.min_pairs = load(p + 3 * kVector);
  return s;
}

// A panel of one tile, and what to prefetch: `fetch_step` bytes at each block of each group of rows.
struct Panel {
  const uint8_t* blocks;
  int tile;
  int first;  // block of the tile
  int count;
  const char* fetch;
  const char* fetch_end;
  size_t fetch_step;
};

// The first R rows of a group with a panel, of which `count` exist; `partial` [R][16] carries sums from panel to panel of a tile.
template <ProductForm form, int R>
__attribute__((noinline)) void panel_rows(const TileArgs& args, Panel& panel, int first_row, int count, float* partial) {
  constexpr bool is_wide = form.chain == 0;
  constexpr size_t code_bytes = is_wide ? 2 * kBlock : kBlock, step = grouped_block_bytes(kGroupRows, is_wide);
  const size_t num_blocks = static_cast<size_t>(args.k) / kBlock;
  const int8_t* x = args.rows.q + (first_row / kGroupRows * num_blocks + panel.first) * step;
  const uint8_t* block = panel.blocks;
  const bool is_first = panel.first == 0, is_last = static_cast<size_t>(panel.first + panel.count) == num_blocks;
  __m256 acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    acc[r][0] = is_first ? _mm256_setzero_ps() : _mm256_load_ps(partial + r * kTileRows);
    acc[r][1] = is_first ? _mm256_setzero_ps() : _mm256_load_ps(partial + r * kTileRows + 8);
  }
  if (is_last) {  // the output, which is rarely in a cache
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float* out = args.out + (first_row + r) * args.out_stride + panel.tile * kTileRows;
      _mm_prefetch(reinterpret_cast<const char*>(out), _MM_HINT_T0);
    }
  }
  const char* fetch = panel.fetch;
  const size_t fetch_step = fetch < panel.fetch_end ? panel.fetch_step : 0;
  for (int i = 0; i < panel.count; ++i, block += panel_step(form), x += step) {
    for (size_t line = 0; line < fetch_step; line += 64, fetch += 64) _mm_prefetch(fetch, _MM_HINT_T1);
    __m256i dot[R][2];
    Scales s[2];
    if constexpr (form.pairs) {
      s[0] = load_panel_scales<form>(block, 0);
      s[1] = load_panel_scales<form>(block, 1);
    }
    if constexpr (is_wide) {
      dot_wide<R>(block + panel_scale_bytes(form), reinterpret_cast<const int16_t*>(x), kBlock, dot);
    } else {
      dot_unsigned<form, R>(PanelCodes{block + panel_scale_bytes(form)}, s, x, kBlock, dot);
    }
    s[0] = load_panel_scales<form>(block, 0);
    s[1] = load_panel_scales<form>(block, 1);
    const float* scale = reinterpret_cast<const float*>(x + kGroupRows * code_bytes);
    const int32_t* minus_sum = reinterpret_cast<const int32_t*>(scale + 2 * kGroupRows);
    add_blocks<form, R>(dot, s, RowBlock{scale, scale + kGroupRows, minus_sum, minus_sum + kGroupRows}, 1, acc);
  }
  panel.fetch = fetch;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (is_last) {
      if (r < count) store(args, first_row + r, panel.tile, acc[r][0], acc[r][1]);
    } else {
      _mm256_store_ps(partial + r * kTileRows, acc[r][0]);
      _mm256_store_ps(partial + r * kTileRows + 8, acc[r][1]);
    }
  }
}

// All rows of x with a panel, group by group.
template <ProductForm form>
void panel_all_rows(const TileArgs& args, Panel& panel, float* partial) {
  for (int row = 0; row < args.m; row += kGroupRows, partial += kGroupRows * kTileRows) {
    const int count = args.m - row;
    if (count > 4) panel_rows<form, 6>(args, panel, row, count, partial);
    else if (count > 2) panel_rows<form, 4>(args, panel, row, count, partial);
    else panel_rows<form, 2>(args, panel, row, count, partial);
  }
}

template <WeightKind kind>
void panel_tile(const TileArgs& args, int tile) {
  constexpr ProductForm form = product_form(kind);
  constexpr int most = kPanelBytes / panel_step(form);
  alignas(64) uint8_t blocks[most * panel_step(form)];
  alignas(64) float partial[kMaxTaskRows * kTileRows];
  const int num_blocks = args.k / kBlock;
  const int num_panels = (num_blocks + most - 1) / most, per_panel = (num_blocks + num_panels - 1) / num_panels;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  Panel panel{};
  panel.blocks = blocks;
  panel.tile = tile;
  panel.fetch = reinterpret_cast<const char*>(packed + args.tile_bytes);
  panel.fetch_end = panel.fetch + args.tile_bytes;
  const int num_groups = (args.m + kGroupRows - 1) / kGroupRows;
  panel.fetch_step = (args.tile_bytes / (static_cast<size_t>(num_blocks) * num_groups) + 64) / 64 * 64;
  for (; panel.first < num_blocks; panel.first += per_panel) {
    panel.count = num_blocks - panel.first < per_panel ? num_blocks - panel.first : per_panel;
    write_panel<kind>(packed, panel.first, panel.count, blocks);
    panel_all_rows<form>(args, panel, partial);
  }
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    if (args.rows.group == kGroupRows) {
      panel_tile<kind>(args, tile);
    } else {
      stream_tile<kind>(args, tile);
    }
  }
}

}  // namespace
}  // namespace trireme
