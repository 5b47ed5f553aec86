// Shared by GEMMs with quant groups: argument checks, launches, scaling of a group's sum.
#pragma once

#include "cuda/gemm/grouped.h"
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {

constexpr int kTurn = 128;  // k's of one k-step of a warp: 32 for each of four lanes

inline void need_grouped(const char* op, const GroupedArgs& args) {
  const bool is_known = args.group == 32 || args.group == 64 || args.group == 128;
  if (is_known && args.product.k % kTurn == 0 && args.product.m <= skinny_max_rows()) return;
  throw std::invalid_argument(std::string(op) + " takes up to " + std::to_string(skinny_max_rows()) + " rows, groups of 32, 64 or 128 and a K that 128 divides; got " +
                              std::to_string(args.product.m) + " rows, groups of " + std::to_string(args.group) + " and K " + std::to_string(args.product.k));
}

template <int NT, int MT>
void launch_grouped(void (*kernel)(GroupedArgs), const GroupedArgs& args, Stream stream) {
  constexpr size_t shared = shared_floats<NT, MT>() * sizeof(float);
  static_assert(shared <= 48 * 1024);
  launch(kernel, dim3((args.product.n + 16 * NT - 1) / (16 * NT)), dim3(kProductWarps * 32), shared, stream, args);
}

// Adds a group's sums for outputs g and g + 8, times their scales, and resets them.
template <int MT>
__device__ __forceinline__ void add_group(float (&acc)[MT][4], float (&part)[MT][4], float low, float high) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      acc[m][i] = fmaf(part[m][i], i < 2 ? low : high, acc[m][i]);
      part[m][i] = 0.0f;
    }
  }
}

}  // namespace trireme::cuda
