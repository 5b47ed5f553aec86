// Quantizes activations to float8 or int8 with a scale per token: used by norms.cu, one CTA per token held in registers.
#pragma once

#include "cuda/device.cuh"

namespace trireme::cuda {

constexpr int kMaxPacks = 8;  // per thread

// A thread's part of a token between two passes, in whole registers: as elements, the compiler would give each its own.
template <class T>
class Kept {
 public:
  __device__ __forceinline__ Pack<T> operator[](int i) const { return *reinterpret_cast<const Pack<T>*>(&packs_[i]); }
  __device__ __forceinline__ void set(int i, const Pack<T>& pack) { packs_[i] = *reinterpret_cast<const uint4*>(&pack); }

 private:
  uint4 packs_[kMaxPacks];
};

// Quantizes a token to N: its amax maps to 448 or 127. A token that is not finite becomes NaN by its scale.
template <class N>
struct Rounding;

template <>
struct Rounding<fp8> {
  float scale;
  __device__ __forceinline__ explicit Rounding(float largest) : scale(larger(largest, 1e-12f) / 448.0f) {}
  __device__ __forceinline__ fp8 operator()(float x) const { return from_float<fp8>(x / scale); }
};

// The same operations as on the CPU (csrc/cpu/linear/linear_int8_quantize.h), so the same bits.
template <>
struct Rounding<int8_t> {
  float scale, inverse;
  __device__ __forceinline__ explicit Rounding(float largest) {
    const bool is_finite = largest < __int_as_float(0x7f800000), is_tiny = largest < 1e-30f;
    scale = !is_finite ? __int_as_float(0x7fc00000) : is_tiny ? 0.0f : __fdiv_rn(largest, 127.0f);
    inverse = is_finite && !is_tiny ? __fdiv_rn(127.0f, largest) : 0.0f;
  }
  __device__ __forceinline__ int8_t operator()(float x) const { return static_cast<int8_t>(__float2int_rn(__fmul_rn(x, inverse))); }
};

template <class T, class N>
__device__ __forceinline__ void store_rounded(const Pack<T>& pack, const Rounding<N>& rounded, N* out) {
  constexpr int size = Pack<T>::size;
  alignas(size) N values[size];
#pragma unroll
  for (int j = 0; j < size; ++j) values[j] = rounded(to_float(pack.v[j]));
  if constexpr (size == 8) {
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(values);
  } else {
    *reinterpret_cast<uint32_t*>(out) = *reinterpret_cast<const uint32_t*>(values);
  }
}

// A thread's part of a token as N, and the token's scale.
template <class T, class N>
__device__ __forceinline__ void write_as(const Kept<T>& kept, int packs, N* out, float* scale_out, float* shared) {
  constexpr int size = Pack<T>::size;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    if (threadIdx.x + i * blockDim.x >= packs) break;
    const Pack<T> pack = kept[i];
#pragma unroll
    for (int j = 0; j < size; ++j) largest = larger(largest, fabsf(to_float(pack.v[j])));
  }
  largest = warp_max(largest);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  const Rounding<N> rounded(warp_max(threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : 0.0f));
  if (threadIdx.x == 0) *scale_out = rounded.scale;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    store_rounded(kept[i], rounded, out + at * size);
  }
}

template <class T>
__device__ __forceinline__ void write_narrow(const Kept<T>& kept, int packs, Type narrow, void* out, int64_t at, float* scale, float* shared) {
  if (narrow == Type::int8) {
    write_as<T>(kept, packs, static_cast<int8_t*>(out) + at, scale, shared);
  } else {
    write_as<T>(kept, packs, static_cast<fp8*>(out) + at, scale, shared);
  }
}

inline void need_narrow(const char* op, Type narrow) {
  if (narrow != Type::fp8 && narrow != Type::int8) throw std::invalid_argument(std::string(op) + " rounds to float8 or int8");
}

// Launches one CTA per token. Many tokens fill the GPU by themselves; few need all threads on each.
template <class T, class Args>
void launch_rows(const char* op, void (*kernel)(Args), int rows, int width, const Args& args, Stream stream) {
  constexpr int size = Pack<T>::size;
  const int packs = width / size;
  if (width % size != 0 || packs > 1024 * kMaxPacks) {
    throw std::invalid_argument(std::string(op) + " takes widths that " + std::to_string(size) + " divides, up to " +
                                std::to_string(1024 * kMaxPacks * size) + "; got " + std::to_string(width));
  }
  const int wanted = rows >= 512 ? (packs + 3) / 4 : packs;
  const int least = (packs + kMaxPacks - 1) / kMaxPacks;
  int threads = wanted < 1024 ? wanted : 1024;
  if (threads < least) threads = least;
  launch(kernel, dim3(rows), dim3((threads + 31) / 32 * 32), 0, stream, args);
}

}  // namespace trireme::cuda
