// Packing, splitting of a GEMM over the thread pool, and row lookup. Instruction-set independent; see linear.h.
#include "cpu/linear/linear.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>

#include "cpu/cpuinfo.h"
#include "cpu/threads.h"

namespace trireme {
namespace {

// ---------------------------------------------------------------- memory

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunkBytes = 16 * kHugePage;

struct Mapping {
  explicit Mapping(size_t size) : bytes((size + kHugePage - 1) / kHugePage * kHugePage) {
    // One page more than needed, so that the used part can start on a huge page.
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

// Small matrices share mappings, so that all weights of a model fit on few huge pages.
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

// Grows and never shrinks; one per calling thread, so concurrent calls do not interfere.
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

// ---------------------------------------------------------------- splitting

const LinearKernels& kernels() {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::amx: return linear_kernels_amx();
    case Isa::avx512vnni: return linear_kernels_avx512();
    case Isa::avxvnni: return linear_kernels_avxvnni();
    case Isa::avx2: return linear_kernels_avx2();
    case Isa::portable: break;
  }
#endif
  return linear_kernels_portable();
}

constexpr int round_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

QuantizedRows rows_from(const QuantizedRows& rows, int row, int k) {
  const size_t blocks = static_cast<size_t>(blocks_in(k));
  const size_t group = row / rows.group * blocks, inside = row % rows.group;  // in blocks, in rows
  const size_t at = group * rows.step + inside;
  QuantizedRows from = rows;
  from.q += group * rows.q_step + inside * kBlock;
  from.scale += at;
  from.sum += at;
  from.minus_sum += at;
  from.minus_halves += at;
  if (rows.wide != nullptr) from.wide += group * rows.q_step / 2 + inside * kBlock;
  return from;
}

QuantizedRows quantize(const LinearKernels& kernels, const LinearArgs& args, const PackedWeight& weight, Scratch* scratch) {
  const int k = weight.k;
  const bool is_whole = weight.kind == WeightKind::int8;
  const BlockForm form = block_form(weight.kind);
  const bool is_dear = form.second_bits != 0 || form.first_bits == 2;
  const bool is_many = args.m >= kernels.grouped_from || (is_dear && args.m >= kernels.dear_grouped_from);
  const bool grouped = !is_whole && is_many;
  const bool wide = grouped && kernels.wide && form.max_code == 0;
  QuantizedRows rows{};
  rows.group = grouped ? kernels.group : 1;
  rows.sum_factor = kernels.scaled_sums ? sum_factor(form) : 1;
  const size_t blocks = static_cast<size_t>(round_up(args.m, rows.group)) * blocks_in(k);
  uint8_t* memory = scratch->reserve(blocks * grouped_block_bytes(1, wide) + 64);
  const size_t between = grouped ? rows.group : blocks;  // stride between blocks
  rows.q = reinterpret_cast<int8_t*>(memory);
  rows.scale = reinterpret_cast<float*>(memory + between * kBlock * (wide ? 2 : 1));
  rows.sum = rows.scale + between;
  rows.minus_sum = reinterpret_cast<int32_t*>(rows.sum + between);
  rows.minus_halves = rows.minus_sum + between;
  if (wide) rows.wide = reinterpret_cast<int16_t*>(memory);
  if (grouped) {
    rows.q_step = grouped_block_bytes(rows.group, wide);
    rows.step = rows.q_step / 4;
  }
  const int small = std::max(args.m / (2 * num_threads()), 4096 / k);
  const int per_task = round_up(std::max(1, std::min(16384 / k, small)), rows.group);
  const int num_tasks = (args.m + per_task - 1) / per_task;
  const QuantizeRowFn quantize_row = is_whole ? kernels.quantize_whole_row : kernels.quantize_row;
  parallel(num_tasks, [&](int task, int) {
    const int end = std::min(args.m, (task + 1) * per_task);
    for (int row = task * per_task; row < end; ++row) {
      quantize_row(args.x + row * args.x_stride, k, rows_from(rows, row, k));
    }
  });
  return rows;
}

// Multiply-adds per task: many relative to the cost of claiming one, few relative to a whole GEMM.
constexpr int64_t kTaskWork = 3 << 20;
// Below this many multiply-adds, waking a thread does not pay.
constexpr int64_t kSerialWork = 40000;

}  // namespace

std::unique_ptr<PackedWeight> pack_weight(WeightKind kind, const uint8_t* raw, int n, int k) {
  auto weight = std::make_unique<PackedWeight>();
  const size_t raw_row = raw_row_bytes(kind, k);
  weight->kind = kind;
  weight->n = n;
  weight->k = k;
  weight->num_tiles = (n + kTileRows - 1) / kTileRows;
  weight->tile_bytes = packed_tile_bytes(kind, k);
  uint8_t* data = allocate(std::max<size_t>(weight->nbytes(), 64), &weight->memory);  // fresh mappings are zero
  weight->data = data;
  parallel(weight->num_tiles, [&](int tile, int) {
    const int rows = std::min(kTileRows, n - tile * kTileRows);
    pack_tile(kind, raw + static_cast<size_t>(tile) * kTileRows * raw_row, raw_row, rows, k,
              data + tile * weight->tile_bytes);
  });
  return weight;
}

void linear(const PackedWeight& weight, const LinearArgs& args) {
  if (args.m <= 0 || weight.n <= 0) return;
  thread_local Scratch scratch;
  const LinearKernels& set = kernels();
  const bool rounds = !is_dense_kind(weight.kind);
  QuantizedRows rows{};
  if (rounds) rows = quantize(set, args, weight, &scratch);
  const TileFn run = set.tiles[static_cast<int>(weight.kind)];

  // A task is a rectangle: a chunk of the rows of x by a run of tiles.
  const size_t row_bytes = static_cast<size_t>(weight.k) * (rows.wide != nullptr ? 2 : 1);
  const int fitting = static_cast<int>(set.task_row_bytes / row_bytes);
  const int most_rows = rounds ? std::clamp(fitting, 48, set.task_rows) : kMaxTaskRows;
  const int row_chunks = (args.m + most_rows - 1) / most_rows;
  const int even_chunk = (args.m + row_chunks - 1) / row_chunks;
  const int rows_per_chunk = round_up(even_chunk, rows.group);
  const int64_t work = static_cast<int64_t>(weight.n) * weight.k * args.m;
  const int threads = work < kSerialWork ? 1 : num_threads();
  const int64_t num_tasks = threads == 1 ? 1 : std::max<int64_t>(threads * 4, work / kTaskWork);
  const int wanted = static_cast<int>(std::clamp<int64_t>(num_tasks / row_chunks, 1, weight.num_tiles));
  const int tiles_per_task = round_up((weight.num_tiles + wanted - 1) / wanted, rows.group > 1 ? set.strip_tiles : 1);
  const int tile_chunks = (weight.num_tiles + tiles_per_task - 1) / tiles_per_task;

  auto run_task = [&](int task, int) {
    const int first_row = task / tile_chunks * rows_per_chunk;
    const int first_tile = task % tile_chunks * tiles_per_task;
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
    if (rounds) {
      tile.rows = rows_from(rows, first_row, weight.k);
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
  auto read = [&](int row, int) {
    const uint8_t* tile = weight.data + static_cast<size_t>(ids[row] / kTileRows) * weight.tile_bytes;
    read_row(weight.kind, tile, ids[row] % kTileRows, weight.k, out + row * out_stride);
  };
  if (count < 4) {
    for (int row = 0; row < count; ++row) read(row, 0);
  } else {
    parallel(count, read);
  }
}

}  // namespace trireme
