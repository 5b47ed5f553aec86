// int8 x int8 GEMMs with exact integer sums: skinny_int8.cu. No CUDA types.
#pragma once

#include "cuda/ops.h"

namespace trireme::cuda {

// out [M, N] = sums [M, N] * (x_scale of the token * w_scale of the output) + bias, each step rounded to float32.
struct Int8Scaling {
  const float* x_scale;  // [M]
  const float* w_scale;  // [N]
  const void* bias;      // [N] or null
  void* out;             // [M, N]
  int64_t out_stride;
  int m, n;
  Type type;             // f16 or bf16, of out and bias
};

struct Int8Args {
  const int8_t* x;  // [M, K], tokens x_stride apart; M up to kInt8Rows
  int64_t x_stride;
  const int8_t* w;  // [N, K]; 16 divides K, which is at most kInt8Length, x_stride and both addresses
  int k;
  Int8Scaling scaling;
  int ways;  // split-K: warps that share the K of an output, 1, 2, 4 or 8; 0: chosen by the shape
};

constexpr int kInt8Rows = 64;
constexpr int kInt8Length = 1 << 17;  // whose sums are guaranteed to fit int32
void skinny_int8(const Int8Args& args, Stream stream);

// Only the scaling of existing sums, [M, N] int32, contiguous; 4 divides N.
void scale_int8(const int32_t* sums, const Int8Scaling& scaling, Stream stream);

}  // namespace trireme::cuda
