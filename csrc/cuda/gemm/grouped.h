// GEMMs with weights that have scales per quant group: skinny_w4.cu, skinny_fp8_blocks.cu. No CUDA types.
#pragma once

#include "cuda/ops.h"

namespace trireme::cuda {

// out [M, N] = x [M, K] W [N, K]^T + bias for up to skinny_max_rows() rows; K a multiple of 128.
struct GroupedArgs {
  SkinnyArgs product;   // without scales and ways
  const void* groups;   // [K / group, N], rows group_stride apart: 4 bytes of parameters of an output's quant group
  int64_t group_stride;
  int group;            // inputs: 32, 64 or 128
};

// w: 4-bit codes, [N, K / 128, 4, 4] words of 8. Word j of the t-th four has inputs 32 j + 8 t + (0, 2, 4, 6, 1, 3, 5, 7) of 128,
// lowest bits first. A group is its scale as float16, then its zero as 16 bits: a weight is scale * (code - zero).
void skinny_w4(const GroupedArgs& args, Stream stream);
// Dequantizes those weights to f16 or bf16, out [N, K].
void expand_w4(const GroupedArgs& args, Stream stream);

// w: [N, K] of e4m3; a group is the float32 scale of 128 inputs.
void skinny_fp8_blocks(const GroupedArgs& args, Stream stream);
void expand_fp8_blocks(const GroupedArgs& args, Stream stream);

}  // namespace trireme::cuda
