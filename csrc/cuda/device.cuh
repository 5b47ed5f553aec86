// Shared by all CUDA kernels: element types, 16-byte loads, CTA reductions, launches with programmatic dependent launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/ops.h"

namespace trireme::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;
using fp8 = __nv_fp8_e4m3;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }
__device__ __forceinline__ float to_float(fp8 x) { return static_cast<float>(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16(x); }
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half(x); }
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float x) { return fp8(x); }  // saturates

// 16 bytes as elements of T.
template <class T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T v[size];
};

template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* p) { return *reinterpret_cast<const Pack<T>*>(p); }
template <class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T>& value) { *reinterpret_cast<Pack<T>*>(p) = value; }

// 16 bytes of a token as float, with pending scales applied: `row` is the token's factor, `at` the first column.
template <class T>
struct Wide {
  float v[Pack<T>::size];
};

template <class T>
__device__ __forceinline__ Wide<T> load_scaled(const T* p, const Scales& scales, float row, int at) {
  const Pack<T> pack = load_pack(p);
  Wide<T> wide;
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) wide.v[i] = to_float(pack.v[i]);
  if (scales.columns == nullptr) return wide;
#pragma unroll
  for (int i = 0; i < Pack<T>::size; i += 4) {
    const Pack<float> column = load_pack(scales.columns + at + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) wide.v[i + j] *= row * column.v[j];
  }
  return wide;
}

__device__ __forceinline__ float row_scale(const Scales& scales, int64_t token) { return scales.rows == nullptr ? 1.0f : scales.rows[token]; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}

// The larger of the two, NaN if either is.
__device__ __forceinline__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

// Atomic max of non-negative floats: their bits compare in order, with NaN last.
__device__ __forceinline__ void note_largest(float* largest, float x) { atomicMax(reinterpret_cast<unsigned*>(largest), __float_as_uint(x)); }

// Sum over all threads of a CTA of up to 1024; `shared` has room for 32 floats. All threads get it.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  __syncthreads();
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

// Programmatic dependent launch: `pdl_wait` returns once the previous kernels have ended, `pdl_launch_dependents` lets the next one
// start with work that does not depend on us (loading its weights). Small kernels call it before they wait: the kernel after next may
// then prefetch its weights while the previous one still reads its own, and nobody writes before all previous kernels have ended.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Properties of the current GPU.
struct Card {
  int multiprocessors, shared_bytes, major;
  bool has_clusters() const { return major >= 9; }
};

inline Card current_card() {
  int device = 0;
  Card card{};
  check(cudaGetDevice(&device), "cudaGetDevice");
  auto get = [&](int& value, cudaDeviceAttr attribute) { check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute"); };
  get(card.multiprocessors, cudaDevAttrMultiProcessorCount);
  get(card.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(card.major, cudaDevAttrComputeCapabilityMajor);
  return card;
}

// Launches with programmatic overlap of the previous kernel in the stream, CTAs in clusters.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 cluster, dim3 block, size_t shared, Stream stream, Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, Stream stream, Args... args) {
  launch_clusters(kernel, grid, dim3(1), block, shared, stream, args...);
}

// Throws unless rows are a whole number of 16-byte packs.
template <class T>
void need_packs(const char* op, int width) {
  if (width % Pack<T>::size == 0) return;
  throw std::invalid_argument(std::string(op) + " takes widths that " + std::to_string(Pack<T>::size) + " divides; got " + std::to_string(width));
}

// Calls f with a value of the type named by `type`.
template <class F>
void with_type(Type type, F&& f) {
  switch (type) {
    case Type::f32: return f(float{});
    case Type::f16: return f(f16{});
    case Type::bf16: return f(bf16{});
    case Type::fp8:
    case Type::int8: break;
  }
  throw std::invalid_argument("this kernel takes float32, float16 or bfloat16");
}

template <class F>
void with_half_type(Type type, F&& f) {
  switch (type) {
    case Type::f16: return f(f16{});
    case Type::bf16: return f(bf16{});
    default: break;
  }
  throw std::invalid_argument("this kernel takes float16 or bfloat16");
}

}  // namespace trireme::cuda
