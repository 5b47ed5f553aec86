// Packing, splitting of a product over the thread pool, and row lookup. Instruction-set independent; see linear.h.
#include "linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

#include "cpuinfo.h"
#include "halfs.h"
#include "threads.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- memory

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkBytes = 16 * kHugePage;

struct Mapping {
  explicit Mapping(size_t size) : bytes((size + kHugePage - 1) / kHugePage * kHugePage) {
    // One page more than needed, so that the part in use can start on a huge page.
    base = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    const auto address = (reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
    data = reinterpret_cast<uint8_t*>(address);
    madvise(data, bytes, MADV_HUGEPAGE);
  }
  ~Mapping() { munmap(base, bytes + kHugePage); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void* base;
  uint8_t* data;
  size_t bytes;
  size_t used = 0;
};

// Small matrices share mappings, so that all weights of a model lie on few huge pages.
uint8_t* allocate(size_t size, std::shared_ptr<void>* memory) {
  static std::mutex mutex;
  static std::weak_ptr<Mapping> current;
  size = (size + 63) / 64 * 64;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Mapping> mapping = current.lock();
  if (!mapping || mapping->used + size > mapping->bytes) {
    mapping = std::make_shared<Mapping>(std::max(size, kChunkBytes));
    if (size < kChunkBytes) current = mapping;
  }
  uint8_t* data = mapping->data + mapping->used;
  mapping->used += size;
  *memory = mapping;
  return data;
}

// Grows and never shrinks; each calling thread has its own, so concurrent calls do not meet.
class Scratch {
 public:
  ~Scratch() { ::operator delete[](data_, std::align_val_t(64)); }
  uint8_t* reserve(size_t size) {
    if (size > size_) {
      ::operator delete[](data_, std::align_val_t(64));
      data_ = nullptr;
      size_ = 0;
      data_ = static_cast<uint8_t*>(::operator new[](size, std::align_val_t(64)));
      size_ = size;
    }
    return data_;
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// ---------------------------------------------------------------- packing

size_t raw_block_bytes(WeightKind kind) {
  switch (kind) {
    case WeightKind::f32: return 4;
    case WeightKind::f16:
    case WeightKind::bf16: return 2;
    case WeightKind::q8_0: return 34;
    case WeightKind::q4_0: return 18;
    case WeightKind::q4_1: return 20;
  }
  return 0;
}

// raw points at one block of a row; lane is that row's place in the tile.
void pack_q8_block(const uint8_t* raw, uint8_t* packed, int lane) {
  std::memcpy(packed + 2 * lane, raw, 2);
  uint8_t* values = packed + 2 * kTileRows;
  for (int group = 0; group < kBlock / 4; ++group) {
    std::memcpy(values + (group * kTileRows + lane) * 4, raw + 2 + 4 * group, 4);
  }
}

// A raw 4-bit block has value i in the low nibble of byte i and value i + 16 in the high one.
void pack_q4_block(const uint8_t* raw, uint8_t* packed, int lane, int num_scales) {
  for (int i = 0; i < num_scales; ++i) std::memcpy(packed + 2 * (kTileRows * i + lane), raw + 2 * i, 2);
  const uint8_t* nibbles = raw + 2 * num_scales;
  uint8_t* values = packed + 2 * kTileRows * num_scales;
  auto value = [&](int i) { return i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4; };
  for (int pair = 0; pair < kBlock / 8; ++pair) {
    for (int i = 0; i < 4; ++i) {
      values[(pair * kTileRows + lane) * 4 + i] = static_cast<uint8_t>(value(8 * pair + i) | value(8 * pair + 4 + i) << 4);
    }
  }
}

void pack_tile(WeightKind kind, const uint8_t* raw, size_t raw_row, int rows, int num_blocks, uint8_t* tile) {
  const size_t raw_step = raw_block_bytes(kind), step = packed_block_bytes(kind);
  for (int lane = 0; lane < rows; ++lane) {
    for (int block = 0; block < num_blocks; ++block) {
      const uint8_t* from = raw + lane * raw_row + block * raw_step;
      uint8_t* to = tile + block * step;
      switch (kind) {
        case WeightKind::q8_0: pack_q8_block(from, to, lane); break;
        case WeightKind::q4_0: pack_q4_block(from, to, lane, 1); break;
        case WeightKind::q4_1: pack_q4_block(from, to, lane, 2); break;
        default: std::memcpy(to + lane * raw_step, from, raw_step);
      }
    }
  }
}

// ---------------------------------------------------------------- reading back

void read_block(WeightKind kind, const uint8_t* packed, int lane, float* out) {
  uint16_t bits[2] = {0, 0};
  std::memcpy(&bits[0], packed + 2 * lane, 2);
  const float scale = float_from_fp16(bits[0]);
  if (kind == WeightKind::q8_0) {
    const auto* values = reinterpret_cast<const int8_t*>(packed + 2 * kTileRows);
    for (int i = 0; i < kBlock; ++i) out[i] = scale * static_cast<float>(values[(i / 4 * kTileRows + lane) * 4 + i % 4]);
    return;
  }
  const bool has_min = kind == WeightKind::q4_1;
  if (has_min) std::memcpy(&bits[1], packed + 2 * (kTileRows + lane), 2);
  const float min = float_from_fp16(bits[1]);
  const uint8_t* values = packed + 2 * kTileRows * (has_min ? 2 : 1);
  for (int i = 0; i < kBlock; ++i) {
    const uint8_t byte = values[(i / 8 * kTileRows + lane) * 4 + i % 4];
    const int value = (i & 4) ? byte >> 4 : byte & 15;
    out[i] = has_min ? scale * static_cast<float>(value) + min : scale * static_cast<float>(value - 8);
  }
}

float read_dense(WeightKind kind, const uint8_t* packed, int lane) {
  uint16_t half = 0;
  float value = 0;
  if (kind == WeightKind::f32) {
    std::memcpy(&value, packed + 4 * lane, 4);
    return value;
  }
  std::memcpy(&half, packed + 2 * lane, 2);
  return kind == WeightKind::f16 ? float_from_fp16(half) : float_from_bf16(half);
}

// ---------------------------------------------------------------- splitting

const LinearKernels& kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::avx512vnni: return linear_kernels_avx512();
    case Isa::avx2: return linear_kernels_avx2();
    case Isa::portable: break;
  }
#endif
  return linear_kernels_portable();
}

QuantizedRows quantize(const LinearKernels& kernels, const LinearArgs& args, int k, Scratch* scratch) {
  const size_t blocks = static_cast<size_t>(args.m) * (k / kBlock);
  uint8_t* memory = scratch->reserve(blocks * (kBlock + 12) + 64);
  QuantizedRows rows{};
  rows.scale = reinterpret_cast<float*>(memory);
  rows.sum = rows.scale + blocks;
  rows.minus_sum = reinterpret_cast<int32_t*>(rows.sum + blocks);
  rows.q = reinterpret_cast<int8_t*>(rows.minus_sum + blocks);
  const int per_task = std::max(1, 16384 / k);
  const int num_tasks = (args.m + per_task - 1) / per_task;
  parallel(num_tasks, [&](int task, int) {
    const int end = std::min(args.m, (task + 1) * per_task);
    for (int row = task * per_task; row < end; ++row) {
      const size_t at = static_cast<size_t>(row) * (k / kBlock);
      kernels.quantize_row(args.x + row * args.x_stride, k, rows.q + at * kBlock, rows.scale + at, rows.sum + at,
                           rows.minus_sum + at);
    }
  });
  return rows;
}

// Rows of x that one task takes: few enough that their int8 form stays in the second-level cache.
constexpr int kRowsPerTask = 96;
// Less than this many multiply-adds is not worth waking a thread.
constexpr int64_t kSerialWork = 40000;

}  // namespace

std::unique_ptr<PackedWeight> pack_weight(WeightKind kind, const uint8_t* raw, int n, int k) {
  auto weight = std::make_unique<PackedWeight>();
  const int num_blocks = is_block_kind(kind) ? k / kBlock : k;
  const size_t raw_row = raw_block_bytes(kind) * num_blocks;
  weight->kind = kind;
  weight->n = n;
  weight->k = k;
  weight->num_tiles = (n + kTileRows - 1) / kTileRows;
  weight->tile_bytes = packed_block_bytes(kind) * num_blocks;
  uint8_t* data = allocate(std::max<size_t>(weight->nbytes(), 64), &weight->memory);  // fresh mappings are zero
  weight->data = data;
  parallel(weight->num_tiles, [&](int tile, int) {
    const int rows = std::min(kTileRows, n - tile * kTileRows);
    pack_tile(kind, raw + static_cast<size_t>(tile) * kTileRows * raw_row, raw_row, rows, num_blocks,
              data + tile * weight->tile_bytes);
  });
  return weight;
}

void linear(const PackedWeight& weight, const LinearArgs& args) {
  if (args.m <= 0 || weight.n <= 0) return;
  thread_local Scratch scratch;
  const LinearKernels& set = kernels();
  const bool is_block = is_block_kind(weight.kind);
  QuantizedRows rows{};
  if (is_block) rows = quantize(set, args, weight.k, &scratch);
  const TileFn run = set.tiles[static_cast<int>(weight.kind)];

  // A task is a rectangle: up to kRowsPerTask rows of x by a run of tiles.
  const int row_chunks = (args.m + kRowsPerTask - 1) / kRowsPerTask;
  const int rows_per_chunk = (args.m + row_chunks - 1) / row_chunks;
  const int64_t work = static_cast<int64_t>(weight.n) * weight.k * args.m;
  const int threads = work < kSerialWork ? 1 : num_threads();
  const int wanted = threads == 1 ? 1 : std::max(1, (threads * 4 + row_chunks - 1) / row_chunks);
  const int tiles_per_task = std::max(1, (weight.num_tiles + wanted - 1) / wanted);
  const int tile_chunks = (weight.num_tiles + tiles_per_task - 1) / tiles_per_task;
  const int blocks_per_row = weight.k / kBlock;

  auto run_task = [&](int task, int) {
    const int first_row = task % row_chunks * rows_per_chunk;
    const int first_tile = task / row_chunks * tiles_per_task;
    const int first_col = first_tile * kTileRows;
    TileArgs tile{};
    tile.tiles = weight.data + first_tile * weight.tile_bytes;
    tile.tile_bytes = weight.tile_bytes;
    tile.num_tiles = std::min(tiles_per_task, weight.num_tiles - first_tile);
    tile.k = weight.k;
    tile.m = std::min(rows_per_chunk, args.m - first_row);
    if (tile.m <= 0) return;
    tile.x = args.x + first_row * args.x_stride;
    tile.x_stride = args.x_stride;
    if (is_block) {
      const size_t at = static_cast<size_t>(first_row) * blocks_per_row;
      tile.rows = {rows.q + at * kBlock, rows.scale + at, rows.sum + at, rows.minus_sum + at};
    }
    tile.out = args.out + first_row * args.out_stride + first_col;
    tile.out_stride = args.out_stride;
    tile.num_cols = weight.n - first_col;
    tile.bias = args.bias == nullptr ? nullptr : args.bias + first_col;
    tile.accumulate = args.accumulate;
    run(tile);
  };
  if (threads == 1) {
    for (int task = 0; task < row_chunks * tile_chunks; ++task) run_task(task, 0);
  } else {
    parallel(row_chunks * tile_chunks, run_task);
  }
}

void gather_rows(const PackedWeight& weight, const int32_t* ids, int count, float* out, ptrdiff_t out_stride) {
  const size_t step = packed_block_bytes(weight.kind);
  auto read_row = [&](int row, int) {
    const int lane = ids[row] % kTileRows;
    const uint8_t* tile = weight.data + static_cast<size_t>(ids[row] / kTileRows) * weight.tile_bytes;
    float* to = out + row * out_stride;
    if (is_block_kind(weight.kind)) {
      for (int block = 0; block < weight.k / kBlock; ++block) read_block(weight.kind, tile + block * step, lane, to + block * kBlock);
    } else {
      for (int i = 0; i < weight.k; ++i) to[i] = read_dense(weight.kind, tile + i * step, lane);
    }
  };
  if (count < 4) {
    for (int row = 0; row < count; ++row) read_row(row, 0);
  } else {
    parallel(count, read_row);
  }
}

}  // namespace trireme
