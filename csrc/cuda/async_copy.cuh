// Asynchronous copies from global to shared memory (cp.async), in commit groups.
#pragma once

#include "cuda/device.cuh"

namespace trireme::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes, or writes zeros unless `is_valid`; IsWhole: all are valid.
template <bool IsWhole>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool is_valid) {
  if constexpr (IsWhole) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    const int bytes = is_valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N groups have arrived.
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

}  // namespace trireme::cuda
