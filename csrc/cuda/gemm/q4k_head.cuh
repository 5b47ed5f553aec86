// The head of GGUF's Q4_K and Q5_K super-blocks.
#pragma once

#include "cuda/device.cuh"

namespace trireme::cuda {

// Eight 6-bit scales and eight 6-bit minima as bytes, and the factors of both.
struct RunScales {
  uint32_t scales[2], minima[2];
  float d, dmin;
};

__device__ __forceinline__ RunScales unpack_scales(uint4 head) {
  const uint32_t a = head.y, b = head.z, c = head.w;
  RunScales s;
  s.scales[0] = a & 0x3f3f3f3fu;
  s.minima[0] = b & 0x3f3f3f3fu;
  s.scales[1] = (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u);
  s.minima[1] = (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u);
  const __half2 factors = *reinterpret_cast<const __half2*>(&head.x);
  s.d = __low2float(factors);
  s.dmin = __high2float(factors);
  return s;
}

}  // namespace trireme::cuda
