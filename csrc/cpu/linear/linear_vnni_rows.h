// Kernels over linear_vnni_impl.h with byte dot products: rows of x by strips of two vectors, so that each broadcast of
// activations is used twice. Included by linear_avx512.cpp and linear_avxvnni.cpp only.
#pragma once

#include "cpu/linear/linear_vnni_impl.h"
#if TRIREME_VNNI_LANES == 16
#include "cpu/linear/linear_store_avx512.h"
#else
#include "cpu/linear/linear_store_avx2.h"
#endif

namespace trireme {
namespace {

constexpr int kMaxRows = TRIREME_VNNI_LANES == 16 ? kAvx512TaskRows : kMaxTaskRows;
// Rows of x per pass: as many as the registers hold.
constexpr int kStreamRows = TRIREME_VNNI_LANES == 16 ? 8 : 5;
constexpr int kPanelRows = TRIREME_VNNI_LANES == 16 ? 6 : 3;
constexpr int kPairRows = TRIREME_VNNI_LANES == 16 ? 4 : 2;

// Initial sums if codes of `kind` have an `offset` (a power of two, or 0) to subtract: minus the offset times the sum of
// activations. minus_sum already includes sum_factor, the halves do not.
template <WeightKind kind, int offset, bool pairs>
INLINE void start_dots(int32_t minus_sum, int32_t minus_halves, Ints (&dot)[2]) {
  if constexpr (offset == 0) {
    dot[0] = dot[1] = no_ints();
  } else if constexpr (pairs) {
    constexpr int shift = __builtin_ctz(offset);
    const Ints halves = every_int(minus_halves);
    dot[0] = left_32(signed_right_32(left_32(halves, 16), 16), shift);
    dot[1] = left_32(signed_right_32(halves, 16), shift);
  } else {
    constexpr int left = offset / sum_factor(block_form(kind));
    dot[0] = every_int(minus_sum);
    if constexpr (left > 1) dot[0] = left_32(dot[0], __builtin_ctz(left));
  }
}

template <int V>
INLINE void store_sums(const TileArgs& args, int row, int tile, const Floats (&acc)[V]) {
#if TRIREME_VNNI_LANES == 16
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) store(args, row, tile + v, acc[v]);
#else
  store(args, row, tile, acc[0], acc[1]);
#endif
}

#if TRIREME_VNNI_LANES == 8
// One of the two vectors of a tile.
INLINE void store_half(const TileArgs& args, int row, int tile, int half, Floats acc) {
  const int first = tile * kTileRows + half * kLanes, cols = args.num_cols - first;
  float* out = args.out + row * args.out_stride + first;
  const float* bias = args.bias == nullptr ? nullptr : args.bias + first;
  if (cols >= kLanes) return store_half(out, bias, args.accumulate, acc);
  float lanes[kLanes];
  put_floats(lanes, acc);
  store_partial(out, bias, args.accumulate, lanes, cols);
}
#endif

// ---------------------------------------------------------------- small M: straight from the packed tiles

// acc + dot products of codes with 4 activations, the same for all lanes.
INLINE void add_products(Ints& acc, Ints codes, const int8_t* q) {
#if TRIREME_VNNI_LANES == 16
  struct Four {
    int8_t values[4];
  };
  // gcc does not fold the broadcast into the instruction by itself.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*reinterpret_cast<const Four*>(q)));
#else
  acc = dot_bytes(acc, codes, every_quad(q));
  pin(acc);
#endif
}

// R rows of x, row by row as in QuantizedRows, with V vectors of a tile from vector `half` on. Prefetches `ahead` bytes further
// (0: nothing).
template <WeightKind kind, int R, int V>
__attribute__((noinline)) void stream_rows(const TileArgs& args, int tile, int half, int first_row, size_t ahead) {
  constexpr BlockForm form = block_form(kind);
  constexpr size_t step = packed_block_bytes(kind);
  constexpr int per_group = form.raw_values / kBlock;
  constexpr bool pairs = has_pairs(form.scale);
  constexpr bool splits = R == 1 && V == 1 && !pairs;  // one row: two independent accumulators
  const size_t num_blocks = static_cast<size_t>(args.k) / kBlock;
  const QuantizedRows& rows = args.rows;
  const uint8_t* packed = args.tiles + tile * args.tile_bytes;
  const int8_t* q = rows.q + first_row * static_cast<ptrdiff_t>(args.k);
  size_t at = first_row * num_blocks;
  Floats acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = no_floats();
  }
  for (size_t group = 0; group < num_blocks / per_group; ++group) {
    const uint8_t* header = packed;
    packed += header_bytes(form.scale);
    for (int block = 0; block < per_group; ++block, packed += step, q += kBlock, ++at) {
      if (ahead != 0) {
        const char* next = reinterpret_cast<const char*>(packed) + ahead;
        for (size_t line = 0; line < step; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
      }
      Ints dot[R][V][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        start_dots<kind, offset_of(form), pairs>(rows.minus_sum[at + r * num_blocks], rows.minus_halves[at + r * num_blocks], dot[r][0]);
        if constexpr (splits) dot[r][0][1] = no_ints();
        if constexpr (V == 2) {
          dot[r][1][0] = dot[r][0][0];
          dot[r][1][1] = dot[r][0][1];
        }
      }
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; ++pair) {
        const int even = pairs ? pair / 2 : 0, odd = splits ? 1 : even;
        Ints a[V], b[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          unpack<kind>(packed + sub_scale_bytes(form.scale), pair, half + v, a[v], b[v]);
          a[v] = unsigned_codes<kind>(a[v]);
          b[v] = unsigned_codes<kind>(b[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const int8_t* x = q + r * static_cast<ptrdiff_t>(args.k) + pair * 8;
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            add_products(dot[r][v][even], a[v], x);
            add_products(dot[r][v][odd], b[v], x + 4);
          }
        }
      }
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const Scales s = load_scales<kind>(header, packed, half + v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const size_t i = at + r * num_blocks;
          if constexpr (splits) dot[r][v][0] = add_32(dot[r][v][0], dot[r][v][1]);
          Floats total = floats(dot[r][v][0]);
          if constexpr (pairs) total = fma(floats(dot[r][v][1]), s.second, mul(total, s.first));
          acc[r][v] = add_block<kind>(acc[r][v], total, s, rows.scale[i], rows.sum[i], rows.minus_halves[i]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#if TRIREME_VNNI_LANES == 8
    if constexpr (V == 1) {
      store_half(args, first_row + r, tile, half, acc[r][0]);
      continue;
    }
#endif
    store_sums<V>(args, first_row + r, tile, acc[r]);
  }
}

// R rows of x with a tile: one row takes the whole tile at once, more take it vector by vector.
template <WeightKind kind, int R>
INLINE void stream_pass(const TileArgs& args, int tile, int row, size_t ahead) {
  if constexpr (R == 1 || kHalves == 1) {
    stream_rows<kind, R, kHalves>(args, tile, 0, row, ahead);
  } else {
    stream_rows<kind, R, 1>(args, tile, 0, row, ahead);
    stream_rows<kind, R, 1>(args, tile, 1, row, 0);
  }
}

template <WeightKind kind>
void stream_tile(const TileArgs& args, int tile) {
  // A single row streams through the weights; more rows stay on a tile while the first of them prefetch the next one.
  const size_t ahead = args.m == 1 ? 2048 : args.tile_bytes;
  for (int row = 0; row < args.m;) {
    const size_t fetch = row == 0 ? ahead : 0;
    const int rows = args.m - row < kStreamRows ? args.m - row : kStreamRows;
    switch (rows) {
      case 8: if constexpr (kStreamRows >= 8) stream_pass<kind, 8>(args, tile, row, fetch); break;
      case 7: if constexpr (kStreamRows >= 7) stream_pass<kind, 7>(args, tile, row, fetch); break;
      case 6: if constexpr (kStreamRows >= 6) stream_pass<kind, 6>(args, tile, row, fetch); break;
      case 5: stream_pass<kind, 5>(args, tile, row, fetch); break;
      case 4: stream_pass<kind, 4>(args, tile, row, fetch); break;
      case 3: stream_pass<kind, 3>(args, tile, row, fetch); break;
      case 2: stream_pass<kind, 2>(args, tile, row, fetch); break;
      default: stream_pass<kind, 1>(args, tile, row, fetch);
    }
    row += rows;
  }
}

// ---------------------------------------------------------------- large M: from a panel

// R rows of a group of 16 with V vectors. `x` is the group's first block of the panel at the first of these rows; `partial`
// [R][V vectors] carries sums from panel to panel of a tile.
template <WeightKind kind, int R, int V>
__attribute__((noinline)) void panel_rows(const TileArgs& args, int tile, int row, const uint8_t* panel, int first, int count, float* partial) {
  constexpr size_t step = panel_step(kind);
  constexpr bool pairs = keeps_pairs(kind);
  const bool is_first = first == 0, is_last = first + count == args.k / kBlock;
  const ptrdiff_t group = row / kTileRows * static_cast<ptrdiff_t>(args.k / kBlock);
  const uint8_t* block_x = reinterpret_cast<const uint8_t*>(args.rows.q) + (group + first) * kGroupedBlock;
  const int8_t* q = reinterpret_cast<const int8_t*>(block_x) + row % kTileRows * kBlock;
  const float* others = reinterpret_cast<const float*>(block_x + kTileRows * kBlock) + row % kTileRows;
  if (is_last) fetch_output(args, row, R, tile, V * kLanes);
  Floats acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = is_first ? no_floats() : load_floats(partial + (r * V + v) * kLanes);
  }
  for (int i = 0; i < count; ++i, panel += V * step, q += kGroupedBlock, others += kGroupedBlock / 4) {
    const int32_t* sums = reinterpret_cast<const int32_t*>(others + 2 * kTileRows);
    Ints dot[R][V][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      start_dots<kind, panel_offset(kind), pairs>(sums[r], sums[r + kTileRows], dot[r][0]);
      if constexpr (V == 2) {
        dot[r][1][0] = dot[r][0][0];
        dot[r][1][1] = dot[r][0][1];
      }
    }
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const int sum = pairs ? quad / 4 : 0;
      Ints w[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) w[v] = load(panel + v * step + panel_codes_at(kind) + quad * kVector);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Ints x = every_quad(q + r * kBlock + 4 * quad);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          dot[r][v][sum] = dot_bytes(dot[r][v][sum], w[v], x);
          pin(dot[r][v][sum]);
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const uint8_t* p = panel + v * step;
      Scales s{};
      s.scale = load_floats(p);
      if constexpr (has_mins(block_form(kind).scale)) s.min = load_floats(p + kVector);
      if constexpr (kind == WeightKind::q2_k) s.min_pairs = load(p + 2 * kVector);
      if constexpr (pairs) {
        s.first = load_floats(p + kVector);
        s.second = load_floats(p + 2 * kVector);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        Floats total = floats(dot[r][v][0]);
        if constexpr (pairs) total = fma(floats(dot[r][v][1]), s.second, mul(total, s.first));
        acc[r][v] = add_block<kind>(acc[r][v], total, s, others[r], others[r + kTileRows], sums[r + kTileRows]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (is_last) {
      store_sums<V>(args, row + r, tile, acc[r]);
    } else {
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) put_floats(partial + (r * V + v) * kLanes, acc[r][v]);
    }
  }
}

// The rows of one group, as evenly as the registers allow.
template <WeightKind kind, int V>
INLINE void panel_group(const TileArgs& args, int tile, int row, int rows, const uint8_t* panel, int first, int count, float* partial) {
  constexpr int most = keeps_pairs(kind) ? kPairRows : kPanelRows;
  while (rows > 0) {
    const int passes = (rows + most - 1) / most;
    const int now = (rows + passes - 1) / passes;
    switch (now) {
      case 6: if constexpr (most >= 6) panel_rows<kind, 6, V>(args, tile, row, panel, first, count, partial); break;
      case 5: if constexpr (most >= 5) panel_rows<kind, 5, V>(args, tile, row, panel, first, count, partial); break;
      case 4: if constexpr (most >= 4) panel_rows<kind, 4, V>(args, tile, row, panel, first, count, partial); break;
      case 3: if constexpr (most >= 3) panel_rows<kind, 3, V>(args, tile, row, panel, first, count, partial); break;
      case 2: panel_rows<kind, 2, V>(args, tile, row, panel, first, count, partial); break;
      default: panel_rows<kind, 1, V>(args, tile, row, panel, first, count, partial);
    }
    row += now;
    rows -= now;
    partial += now * V * kLanes;
  }
}

template <WeightKind kind, int V>
void panel_strip(const TileArgs& args, int tile) {
  alignas(64) uint8_t panel[kPanelBlocks * V * panel_step(kind)];
  alignas(64) float partial[kMaxRows * V * kLanes];
  const int num_blocks = args.k / kBlock;
  for (int first = 0, count = 0; first < num_blocks; first += count) {
    count = panel_blocks(num_blocks - first);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      write_panel<kind, false>(args.tiles + (tile + v / kHalves) * args.tile_bytes, v % kHalves, first, count,
                               panel + v * panel_step(kind), V * panel_step(kind));
    }
    for (int row = 0; row < args.m; row += kTileRows) {
      const int rows = args.m - row < kTileRows ? args.m - row : kTileRows;
      panel_group<kind, V>(args, tile, row, rows, panel, first, count, partial + row * V * kLanes);
    }
  }
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  int tile = 0;
  if (args.rows.step == 1) {
    for (; tile < args.num_tiles; ++tile) stream_tile<kind>(args, tile);
    return;
  }
  for (; tile + 2 / kHalves <= args.num_tiles; tile += 2 / kHalves) panel_strip<kind, 2>(args, tile);
  if constexpr (kHalves == 1) {
    if (tile < args.num_tiles) panel_strip<kind, 1>(args, tile);
  }
}

INLINE void set_block_kinds(LinearKernels& kernels) {
  for_block_kinds([&]<WeightKind kind>() { kernels.tiles[static_cast<int>(kind)] = block_tiles<kind>; });
}

}  // namespace
}  // namespace trireme
