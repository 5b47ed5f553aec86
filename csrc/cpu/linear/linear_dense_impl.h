// GEMMs with dense weights (f32, f16, bf16) for one instruction set; see linear.h. Included by linear_dense_*.cpp.
//
// Small M reads the weights directly. Larger M is processed in groups per panel of kPanel k's: the first group stores the weights
// it reads in fp32, the others find them in L1. Sums are kept in `sums` from one panel to the next, so every lane runs over k in
// order through one accumulator for any M.
#pragma once

#include <algorithm>

#include "cpu/linear/linear.h"
#include "cpu/simd16.h"

namespace trireme::TRIREME_VARIANT {

// (rows of x, tiles) whose sums fit the registers together, and the tiles of a single row that saturate memory bandwidth.
#if defined(__AVX512F__)
inline constexpr int kRegisterRows = 8, kRegisterTiles = 2, kStreamTiles = 8;
#elif defined(__AVX2__)
inline constexpr int kRegisterRows = 6, kRegisterTiles = 1, kStreamTiles = 4;
#else
inline constexpr int kRegisterRows = 2, kRegisterTiles = 1, kStreamTiles = 1;
#endif
inline constexpr int kPanel = 192;
inline constexpr int kMaxRows = 96;  // rows of x that share a panel
// Up to this many groups of rows, arithmetic does not hide the latency of loading weights: they are prefetched.
inline constexpr int kFetchGroups = 4;

template <WeightKind kind>
struct Stored {
  using Type = float;
};
template <>
struct Stored<WeightKind::f16> {
  using Type = Half;
};
template <>
struct Stored<WeightKind::bf16> {
  using Type = BFloat;
};

// Consecutive k's of consecutive tiles, from weights or panel.
template <class W>
struct Columns {
  const W* first;
  ptrdiff_t tile_step;  // elements
  const W* tile(int t) const { return first + t * tile_step; }
};

struct Rows {
  const float* x;
  ptrdiff_t stride;
};

// acc[r][t] += sum over k of x times columns. `keep` writes the columns to `panel`; `fetch` prefetches memory from `ahead` on,
// 16 bytes per k.
template <int R, int T, bool keep, bool fetch, class W>
TRIREME_INLINE void add_products(Vec (&acc)[R][T], Rows rows, Columns<W> columns, int k, float* panel, const char* ahead) {
  const auto step = [&](int i) __attribute__((always_inline)) {
    Vec column[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      column[t] = load(columns.tile(t) + kLanes * i);
      if constexpr (keep) store(panel + (t * kPanel + i) * kLanes, column[t]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec value = set1(rows.x[r * rows.stride + i]);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) acc[r][t] = fma(column[t], value, acc[r][t]);
    }
  };
  int i = 0;
  if constexpr (fetch) {
    for (; i + 4 <= k; i += 4) {
      __builtin_prefetch(ahead + 16 * i);
      step(i);
      step(i + 1);
      step(i + 2);
      step(i + 3);
    }
  }
#pragma GCC unroll 2
  for (; i < k; ++i) step(i);
}

TRIREME_INLINE void write(const TileArgs& args, int row, int tile, Vec acc) {
  const int first = tile * kTileRows;
  const int cols = args.num_cols - first;
  float* out = args.out + row * args.out_stride + first;
  if (cols >= kTileRows) {
    if (args.bias != nullptr) acc = add(acc, load(args.bias + first));
    if (args.accumulate) acc = add(acc, load(out));
    return store(out, acc);
  }
  if (args.bias != nullptr) acc = add(acc, load_first(args.bias + first, cols));
  if (args.accumulate) acc = add(acc, load_first(out, cols));
  store_first(out, acc, cols);
}

// A group of rows of x on one panel.
struct Turn {
  Rows rows;
  int k;
  float* panel;
  const char* ahead;
  float* sums;  // [rows][tiles][16]
  bool is_first, is_last;
  int row, tile;  // in args
};

// Not inlined: calls behind a partial copy would make the callers save every sum.
__attribute__((noinline)) static void finish(const TileArgs& args, const Turn& turn, int rows, int tiles) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < tiles; ++t) write(args, turn.row + r, turn.tile + t, load(turn.sums + (r * tiles + t) * kLanes));
  }
}

template <int R, int T, bool keep, bool fetch, class W>
TRIREME_INLINE void take_turn(const TileArgs& args, const Turn& turn, Columns<W> columns) {
  Vec acc[R][T];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) acc[r][t] = turn.is_first ? zero() : load(turn.sums + (r * T + t) * kLanes);
  }
  add_products<R, T, keep, fetch>(acc, turn.rows, columns, turn.k, turn.panel, turn.ahead);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      store(turn.sums + (r * T + t) * kLanes, acc[r][t]);
    }
  }
  if (turn.is_last) finish(args, turn, R, T);
}

template <int R, int T, bool keep, bool fetch, class W>
__attribute__((noinline)) void take_turn_of(int rows, const TileArgs& args, const Turn& turn, Columns<W> columns) {
  if constexpr (R > 1) {
    if (rows < R) return take_turn_of<R - 1, T, keep, fetch>(rows, args, turn, columns);
  }
  take_turn<R, T, keep, fetch>(args, turn, columns);
}

template <WeightKind kind, int T>
Columns<typename Stored<kind>::Type> columns_at(const TileArgs& args, int tile, int k) {
  using W = typename Stored<kind>::Type;
  return {reinterpret_cast<const W*>(args.tiles + tile * args.tile_bytes) + k * kLanes,
          static_cast<ptrdiff_t>(args.tile_bytes / sizeof(W))};
}

// All groups of a chunk of rows, by T tiles.
template <WeightKind kind, int T, bool fetch>
void multiply_block(const TileArgs& args, int first_row, int num_rows, int tile) {
  constexpr bool convert = kind != WeightKind::f32;
  alignas(64) float panel[convert ? T * kPanel * kLanes : 1];
  alignas(64) float sums[kMaxRows * T * kLanes];
  const int groups = (num_rows + kRegisterRows - 1) / kRegisterRows;
  for (int k0 = 0; k0 < args.k; k0 += kPanel) {
    Turn turn{};
    turn.k = std::min(kPanel, args.k - k0);
    turn.panel = panel;
    turn.is_first = k0 == 0;
    turn.is_last = k0 + turn.k == args.k;
    turn.tile = tile;
    const auto columns = columns_at<kind, T>(args, tile, k0);
    const char* ahead = reinterpret_cast<const char*>(columns.first + turn.k * kLanes);
    int row = 0;
    for (int group = 0; group < groups; ++group) {
      const int rows = num_rows / groups + (group < num_rows % groups);
      turn.row = first_row + row;
      turn.rows = {args.x + turn.row * args.x_stride + k0, args.x_stride};
      turn.sums = sums + row * T * kLanes;
      turn.ahead = ahead + group * turn.k * 16;
      if (convert && group > 0) {
        take_turn_of<kRegisterRows, T, false, fetch>(rows, args, turn, Columns<float>{panel, kPanel * kLanes});
      } else if (convert && groups > 1) {
        take_turn_of<kRegisterRows, T, convert, fetch>(rows, args, turn, columns);
      } else {
        take_turn_of<kRegisterRows, T, false, fetch>(rows, args, turn, columns);
      }
      row += rows;
    }
  }
}

// A few rows R of x by T tiles.
template <WeightKind kind, int R, int T>
void multiply_few(const TileArgs& args, int tile) {
  alignas(64) float sums[R * T * kLanes];
  Turn turn{};
  turn.sums = sums;
  turn.rows = {args.x, args.x_stride};
  turn.k = args.k;
  turn.is_first = turn.is_last = true;
  turn.tile = tile;
  take_turn<R, T, false, false>(args, turn, columns_at<kind, T>(args, tile, 0));
}

template <WeightKind kind, int T>
void multiply_tiles(const TileArgs& args, int tile) {
  if (args.m <= kFetchGroups * kRegisterRows) return multiply_block<kind, T, true>(args, 0, args.m, tile);
  for (int row = 0; row < args.m; row += kMaxRows) {
    multiply_block<kind, T, false>(args, row, std::min(kMaxRows, args.m - row), tile);
  }
}

template <WeightKind kind>
void dense_tiles(const TileArgs& args) {
  int tile = 0;
  if (args.m == 1) {
    for (; tile + kStreamTiles <= args.num_tiles; tile += kStreamTiles) multiply_few<kind, 1, kStreamTiles>(args, tile);
  } else if (args.m <= 3 && kStreamTiles > 1) {
    for (; tile + 2 <= args.num_tiles; tile += 2) {
      args.m == 2 ? multiply_few<kind, 2, 2>(args, tile) : multiply_few<kind, 3, 2>(args, tile);
    }
  }
  for (; tile + kRegisterTiles <= args.num_tiles; tile += kRegisterTiles) multiply_tiles<kind, kRegisterTiles>(args, tile);
  for (; tile < args.num_tiles; ++tile) multiply_tiles<kind, 1>(args, tile);
}

TRIREME_INLINE TileFn dense_kernel(WeightKind kind) {
  switch (kind) {
    case WeightKind::f16: return dense_tiles<WeightKind::f16>;
    case WeightKind::bf16: return dense_tiles<WeightKind::bf16>;
    default: return dense_tiles<WeightKind::f32>;
  }
}

}  // namespace trireme::TRIREME_VARIANT
