// Kernels of linear.h for AMX int8 tiles (and AVX-512), for large M; small M falls back to linear_avx512.cpp. A tile of sums is
// 16 rows of x by the 16 of a weight tile, over one block: the code after a block's dot products is bit-identical to that file's.
#define TRIREME_VNNI_LANES 16
#include "cpu/linear/amx_tiles.h"
#include "cpu/linear/linear_store_avx512.h"
#include "cpu/linear/linear_vnni_impl.h"

namespace trireme {
namespace {

constexpr int kPanelTiles = 2;  // weight tiles per group of rows while it is in L1
// Below this M, and for a last group this small, linear_avx512.cpp is used.
constexpr int kGroupedFrom = 32, kFewRows = 8;
constexpr int kSumBytes = 4 * kTileRows * kTileRows;

// Registers: 0-3 sums of blocks in flight, 4 and 5 rows of x, 6 and 7 weights.
template <WeightKind kind>
void configure() {
  constexpr int parts = keeps_pairs(kind) ? 2 : 1;
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = i < 6 ? kTileRows : 8 / parts;
    config.row_bytes[i] = i < 4 || i > 5 ? 64 : kBlock / parts;
  }
  tile_config(config);
}

// Sums of one block (or both its halves, into two registers) in flight.
template <WeightKind kind, int slot>
INLINE void start_block(const int8_t* x, const uint8_t* codes) {
  if constexpr (keeps_pairs(kind)) {
    constexpr int sums = slot % 2 * 2;
    tile_zero<sums>();
    tile_zero<sums + 1>();
    tile_load<4>(x, kBlock);
    tile_load<6>(codes, 64);
    tile_dot<sums, 4, 6>();
    tile_load<5>(x + kBlock / 2, kBlock);
    tile_load<7>(codes + 4 * 64, 64);
    tile_dot<sums + 1, 5, 7>();
  } else {
    tile_zero<slot>();
    tile_load<4 + slot % 2>(x, kBlock);
    tile_load<6 + slot % 2>(codes, 64);
    tile_dot<slot, 4 + slot % 2, 6 + slot % 2>();
  }
}

template <WeightKind kind, int slot>
INLINE void store_block(uint8_t* sums) {
  if constexpr (keeps_pairs(kind)) {
    tile_store<slot % 2 * 2>(sums, 64);
    tile_store<slot % 2 * 2 + 1>(sums + kSumBytes, 64);
  } else {
    tile_store<slot>(sums, 64);
  }
}

template <WeightKind kind>
INLINE void finish_block(Floats (&acc)[kTileRows], const uint8_t* sums, const uint8_t* panel, const uint8_t* group) {
  const float* others = reinterpret_cast<const float*>(group + kTileRows * kBlock);
  const int32_t* halves = reinterpret_cast<const int32_t*>(others + 3 * kTileRows);
  Scales s{};
  s.scale = load_floats(panel);
  if constexpr (has_mins(block_form(kind).scale)) s.min = load_floats(panel + kVector);
  if constexpr (kind == WeightKind::q2_k) s.min_pairs = load(panel + 2 * kVector);
  if constexpr (keeps_pairs(kind)) {
    s.first = load_floats(panel + kVector);
    s.second = load_floats(panel + 2 * kVector);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    Floats total = floats(load(sums + 64 * r));
    if constexpr (keeps_pairs(kind)) total = fma(floats(load(sums + kSumBytes + 64 * r)), s.second, mul(total, s.first));
    acc[r] = add_block<kind>(acc[r], total, s, others[r], others[r + kTileRows], halves[r]);
  }
}

// A block's sums are stored two steps after it was started and finished two steps later, since stored tiles take a while to
// become readable. Buffers and sum registers rotate.
constexpr int kStoreAfter = 2, kFinishAfter = 4, kInFlight = 4;

// One group of 16 rows with a panel; `partial` [16][16] carries sums from panel to panel of a tile.
template <WeightKind kind>
__attribute__((noinline)) void group_rows(const TileArgs& args, int tile, int row, const uint8_t* panel, int first, int count, float* partial) {
  constexpr ptrdiff_t step = panel_step(kind), buffer = keeps_pairs(kind) ? 2 * kSumBytes : kSumBytes;
  alignas(64) uint8_t sums[kInFlight * buffer];
  const uint8_t* group = reinterpret_cast<const uint8_t*>(args.rows.q) +
                         (row / kTileRows * static_cast<ptrdiff_t>(args.k / kBlock) + first) * kGroupedBlock;
  const bool is_last = first + count == args.k / kBlock;
  const int rows = args.m - row < kTileRows ? args.m - row : kTileRows;
  if (is_last) fetch_output(args, row, rows, tile, kTileRows);
  Floats acc[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) acc[r] = first == 0 ? no_floats() : load_floats(partial + r * kTileRows);
  auto take = [&]<int slot>(ptrdiff_t i) __attribute__((always_inline)) {
    constexpr int stored = (slot + kInFlight - kStoreAfter) % kInFlight;
    const ptrdiff_t done = i - kFinishAfter;
    if (done >= 0 && done < count) finish_block<kind>(acc, sums + slot * buffer, panel + done * step, group + done * kGroupedBlock);
    if (i >= kStoreAfter && i < count + kStoreAfter) store_block<kind, stored>(sums + stored * buffer);
    if (i < count) start_block<kind, slot>(reinterpret_cast<const int8_t*>(group + i * kGroupedBlock), panel + i * step + panel_codes_at(kind));
  };
  for (ptrdiff_t i = 0; i < count + kFinishAfter; i += kInFlight) {
    take.template operator()<0>(i);
    take.template operator()<1>(i + 1);
    take.template operator()<2>(i + 2);
    take.template operator()<3>(i + 3);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    if (!is_last) {
      put_floats(partial + r * kTileRows, acc[r]);
    } else if (r < rows) {
      store(args, row + r, tile, acc[r]);
    }
  }
}

template <WeightKind kind>
void tile_rows(const TileArgs& args, int tile, int num_tiles) {
  constexpr size_t tile_panel = kPanelBlocks * panel_step(kind), tile_partial = kAvx512TaskRows * kTileRows;
  alignas(64) uint8_t panel[kPanelTiles * tile_panel];
  alignas(64) float partial[kPanelTiles * tile_partial];
  const int num_blocks = args.k / kBlock;
  for (int first = 0, count = 0; first < num_blocks; first += count) {
    count = panel_blocks(num_blocks - first);
    for (int t = 0; t < num_tiles; ++t) {
      write_panel<kind, true>(args.tiles + (tile + t) * args.tile_bytes, 0, first, count, panel + t * tile_panel, panel_step(kind));
    }
    for (int row = 0; row < args.m; row += kTileRows) {
      for (int t = 0; t < num_tiles; ++t) {
        group_rows<kind>(args, tile + t, row, panel + t * tile_panel, first, count, partial + t * tile_partial + row * kTileRows);
      }
    }
  }
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  const TileFn few_rows = linear_kernels_avx512().tiles[static_cast<int>(kind)];
  if (args.rows.step == 1) return few_rows(args);
  const int rest = args.m % kTileRows <= kFewRows ? args.m % kTileRows : 0;
  TileArgs groups = args;
  groups.m -= rest;
  if (groups.m > 0) {
    configure<kind>();
    for (int tile = 0; tile < args.num_tiles; tile += kPanelTiles) {
      tile_rows<kind>(groups, tile, args.num_tiles - tile < kPanelTiles ? args.num_tiles - tile : kPanelTiles);
    }
    tile_release();
  }
  if (rest == 0) return;
  TileArgs last = args;
  const ptrdiff_t skipped = groups.m / kTileRows * static_cast<ptrdiff_t>(args.k / kBlock) * kGroupedBlock;
  last.m = rest;
  last.out += groups.m * args.out_stride;
  last.rows.q += skipped;
  few_rows(last);
}

LinearKernels make_kernels() {
  LinearKernels kernels = linear_kernels_avx512();
  kernels.grouped_from = kGroupedFrom;
  for_block_kinds([&]<WeightKind kind>() { kernels.tiles[static_cast<int>(kind)] = block_tiles<kind>; });
  return kernels;
}

}  // namespace

const LinearKernels& linear_kernels_amx() {
  static const LinearKernels kernels = make_kernels();
  return kernels;
}

}  // namespace trireme
