// Kernels of linear.h in plain C++, for machines without the vector sets and as a check of the others.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "halfs.h"
#include "linear.h"

namespace trireme {
namespace {

void quantize_row(const float* x, int k, const QuantizedRows& row) {
  int8_t* q = row.q;
  for (int block = 0; block < k / kBlock; ++block, x += kBlock, q += kBlock) {
    uint32_t largest = 0;  // compared as integers, so that NaN and infinity win
    for (int i = 0; i < kBlock; ++i) largest = std::max(largest, bits_from_float(x[i]) & 0x7fffffffu);
    const float amax = float_from_bits(largest);
    const bool is_finite = largest < 0x7f800000u;
    const bool is_tiny = amax < 1e-30f;
    const float inverse = !is_finite || is_tiny ? 0.0f : 127.0f / amax;
    int32_t totals[2] = {0, 0};
    for (int i = 0; i < kBlock; ++i) {
      q[i] = inverse == 0.0f ? 0 : static_cast<int8_t>(std::lrintf(x[i] * inverse));
      totals[i / 16] += q[i];
    }
    row.scale[block] = !is_finite ? NAN : is_tiny ? 0.0f : amax / 127.0f;
    row.minus_sum[block] = -(totals[0] + totals[1]);
    row.sum[block] = row.scale[block] * static_cast<float>(-row.minus_sum[block]);
    row.minus_halves[block] = static_cast<int32_t>((static_cast<uint32_t>(-totals[0]) & 0xffffu) | static_cast<uint32_t>(-totals[1]) << 16);
  }
}

void store(const TileArgs& args, int row, int tile, const float* acc) {
  const int first = tile * kTileRows;
  float* out = args.out + row * args.out_stride + first;
  const int cols = std::min(kTileRows, args.num_cols - first);
  for (int lane = 0; lane < cols; ++lane) {
    float value = acc[lane];
    if (args.bias != nullptr) value += args.bias[first + lane];
    if (args.accumulate) value += out[lane];
    out[lane] = value;
  }
}

// Codes of one row of a block as the values that products are made of, offset not yet taken off.
void read_codes(const BlockForm& form, const uint8_t* planes, int lane, int* codes) {
  const uint8_t* second = planes + form.first_bits * 4 * kTileRows;
  auto field = [&](const uint8_t* plane, int bits, int i) {
    const int per_byte = 8 / bits, quad = i / 4;
    const int byte = plane[(quad / per_byte * kTileRows + lane) * 4 + i % 4];
    return byte >> (quad % per_byte * bits) & ((1 << bits) - 1);
  };
  for (int i = 0; i < kBlock; ++i) {
    int code = field(planes, form.first_bits, i);
    if (form.second_bits != 0) code |= field(second, form.second_bits, i) << form.first_bits;
    codes[i] = form.table != nullptr ? form.table[code] : form.first_bits == 8 ? static_cast<int8_t>(code) : code;
  }
}

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return float_from_fp16(half);
}

// acc + what one block of one weight row gives with one row of activations (`at`: its place in `rows`).
float add_block(const BlockForm& form, const uint8_t* header, const uint8_t* sub, int lane, const QuantizedRows& rows,
                size_t at, float acc) {
  int codes[kBlock];
  read_codes(form, sub + sub_scale_bytes(form.scale), lane, codes);
  int32_t dots[2] = {0, 0}, sums[2] = {0, 0};
  for (int i = 0; i < kBlock; ++i) {
    const int q = rows.q[at * kBlock + i];
    dots[i / 16] += (codes[i] - form.offset) * q;
    sums[i / 16] += q;
  }
  const float x_scale = rows.scale[at];
  const float scale = form.scale == ScaleForm::exponent ? float_from_exponent(header[lane]) : half_at(header + 2 * lane);
  const float min = has_mins(form.scale) ? half_at(header + 2 * (kTileRows + lane)) : 0.0f;
  const float dot = static_cast<float>(dots[0] + dots[1]);
  const uint8_t* pair = sub + 2 * lane;
  switch (form.scale) {
    case ScaleForm::half:
    case ScaleForm::exponent: return acc + dot * (scale * x_scale);
    case ScaleForm::half_min: return acc + dot * (scale * x_scale) + min * rows.sum[at];
    case ScaleForm::super32: return acc + dot * (scale * static_cast<int8_t>(sub[lane]) * x_scale);
    case ScaleForm::super32_min:
      return acc + dot * (scale * sub[lane] * x_scale) - min * sub[kTileRows + lane] * rows.sum[at];
    case ScaleForm::super16:
      return acc + static_cast<float>(static_cast<int8_t>(pair[0]) * dots[0] + static_cast<int8_t>(pair[1]) * dots[1]) *
                       (scale * x_scale);
    case ScaleForm::super16_min:
      acc += static_cast<float>((pair[0] & 15) * dots[0] + (pair[1] & 15) * dots[1]) * (scale * x_scale);
      return acc - static_cast<float>((pair[0] >> 4) * sums[0] + (pair[1] >> 4) * sums[1]) * (min * x_scale);
  }
  return acc;
}

template <WeightKind kind>
void block_tiles(const TileArgs& args) {
  constexpr BlockForm form = block_form(kind);
  constexpr int per_group = form.raw_values / kBlock;
  const int num_blocks = args.k / kBlock;
  for (int tile = 0; tile < args.num_tiles; ++tile) {
    for (int row = 0; row < args.m; ++row) {
      float acc[kTileRows] = {};
      for (int block = 0; block < num_blocks; ++block) {
        const uint8_t* header = args.tiles + tile * args.tile_bytes + block / per_group * packed_group_bytes(kind);
        const uint8_t* sub = header + header_bytes(form.scale) + block % per_group * packed_block_bytes(kind);
        const size_t at = static_cast<size_t>(row) * num_blocks + block;
        for (int lane = 0; lane < kTileRows; ++lane) {
          acc[lane] = add_block(form, header, sub, lane, args.rows, at, acc[lane]);
        }
      }
      store(args, row, tile, acc);
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels_portable() {
  static const LinearKernels kernels{
      quantize_row,
      {dense_tiles_portable(WeightKind::f32), dense_tiles_portable(WeightKind::f16), dense_tiles_portable(WeightKind::bf16),
       block_tiles<WeightKind::q8_0>, block_tiles<WeightKind::q4_0>, block_tiles<WeightKind::q4_1>,
       block_tiles<WeightKind::q5_0>, block_tiles<WeightKind::q5_1>, block_tiles<WeightKind::q2_k>,
       block_tiles<WeightKind::q3_k>, block_tiles<WeightKind::q4_k>, block_tiles<WeightKind::q5_k>,
       block_tiles<WeightKind::q6_k>, block_tiles<WeightKind::iq4_nl>, block_tiles<WeightKind::iq4_xs>,
       block_tiles<WeightKind::mxfp4>},
  };
  return kernels;
}

}  // namespace trireme
