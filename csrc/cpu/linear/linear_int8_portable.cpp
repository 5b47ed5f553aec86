// GEMMs with int8 weights in plain C++: a block is unpacked once for all rows of x, one output per lane. Bit-identical to the
// vector sets.
#include <cstring>

#include "cpu/linear/linear.h"
#include "cpu/linear/linear_int8_quantize.h"

namespace trireme {
namespace {

constexpr size_t kCodesAt = 8 * kTileRows;
// This many blocks sum to less than 2^24 (128 * 127 * 1024), exact in float32.
constexpr int kExactBlocks = 32;

void unpack(const uint8_t* codes, float (*to)[kTileRows]) {
  for (int i = 0; i < kBlock; ++i) {
    for (int lane = 0; lane < kTileRows; ++lane) to[i][lane] = static_cast<int8_t>(codes[(i / 4 * kTileRows + lane) * 4 + i % 4]);
  }
}

void finish(const TileArgs& args, int row, int tile, const int32_t* sums, const float* scales, float x_scale) {
  const int first = tile * kTileRows;
  const int cols = args.num_cols - first < kTileRows ? args.num_cols - first : kTileRows;
  float* out = args.out + row * args.out_stride + first;
  for (int lane = 0; lane < cols; ++lane) {
    float value = static_cast<float>(sums[lane]) * (scales[lane] * x_scale);
    if (args.bias != nullptr) value += args.bias[first + lane];
    if (args.accumulate) value += out[lane];
    out[lane] = value;
  }
}

void int8_tiles(const TileArgs& args) {
  const int num_blocks = blocks_in(args.k);
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    const uint8_t* at = args.tiles + tile * args.tile_bytes;
    int32_t sums[kMaxTaskRows][kTileRows] = {};
    float part[kMaxTaskRows][kTileRows] = {};
    for (int block = 0; block < num_blocks; ++block) {
      float codes[kBlock][kTileRows];
      unpack(at + kCodesAt + block * kBlock * kTileRows, codes);
      const bool is_full = (block + 1) % kExactBlocks == 0 || block + 1 == num_blocks;
      for (int row = 0; row < args.m; ++row) {
        const int8_t* x = args.rows.q + (static_cast<ptrdiff_t>(row) * num_blocks + block) * kBlock;
        float dot[kTileRows] = {};
        for (int i = 0; i < kBlock; ++i) {
          for (int lane = 0; lane < kTileRows; ++lane) dot[lane] += codes[i][lane] * static_cast<float>(x[i]);
        }
        for (int lane = 0; lane < kTileRows; ++lane) part[row][lane] += dot[lane];
        if (!is_full) continue;
        for (int lane = 0; lane < kTileRows; ++lane) {
          sums[row][lane] += static_cast<int32_t>(part[row][lane]);
          part[row][lane] = 0.0f;
        }
      }
    }
    float scales[kTileRows];
    std::memcpy(scales, at, sizeof scales);
    for (int row = 0; row < args.m; ++row) {
      finish(args, row, tile, sums[row], scales, args.rows.scale[static_cast<ptrdiff_t>(row) * num_blocks]);
    }
  }
}

}  // namespace

Int8Kernels int8_kernels_portable() { return {quantize_whole_row<0>, int8_tiles}; }

}  // namespace trireme
