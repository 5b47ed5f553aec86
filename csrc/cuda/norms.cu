// RMS norms, with the addition to the residual before and the quantization to fp8 after in the same pass. One block per token.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kMaxPacks = 8;  // of one thread, kept in registers between the two passes

// A thread's part of a row as fp8, with the scale that makes the row's largest magnitude 448.
template <class T>
__device__ __forceinline__ void write_fp8(const Pack<T> (&kept)[kMaxPacks], int packs, fp8* out, float* scale_out, float* shared) {
  constexpr int size = Pack<T>::size;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    if (threadIdx.x + i * blockDim.x >= packs) break;
#pragma unroll
    for (int j = 0; j < size; ++j) largest = fmaxf(largest, fabsf(to_float(kept[i].v[j])));
  }
  largest = warp_max(largest);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = warp_max(threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : 0.0f);
  const float scale = fmaxf(largest, 1e-12f) / 448.0f;
  if (threadIdx.x == 0) *scale_out = scale;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    alignas(size) fp8 values[size];
#pragma unroll
    for (int j = 0; j < size; ++j) values[j] = from_float<fp8>(to_float(kept[i].v[j]) / scale);
    if constexpr (size == 8) {
      *reinterpret_cast<uint2*>(out + at * size) = *reinterpret_cast<const uint2*>(values);
    } else {
      *reinterpret_cast<uint32_t*>(out + at * size) = *reinterpret_cast<const uint32_t*>(values);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(1024) rms_norm_kernel(NormArgs args) {
  __shared__ float shared[32];
  constexpr int size = Pack<T>::size;
  const int packs = args.hidden / size;
  const int64_t token = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  T* residual = static_cast<T*>(args.residual);
  if (residual != nullptr) residual += token * args.residual_stride;
  const T* weight = static_cast<const T*>(args.weight);
  let_next_start();
  wait_for_inputs();
  const float row = row_scale(args.x_scales, token);
  Pack<T> kept[kMaxPacks];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    Wide<T> wide = load_scaled(x + at * size, args.x_scales, row, at * size);
    if (residual != nullptr) {
      const Pack<T> before = load_pack(residual + at * size);
#pragma unroll
      for (int j = 0; j < size; ++j) wide.v[j] += to_float(before.v[j]);
    }
#pragma unroll
    for (int j = 0; j < size; ++j) kept[i].v[j] = from_float<T>(wide.v[j]);
    if (residual != nullptr) store_pack(residual + at * size, kept[i]);
#pragma unroll
    for (int j = 0; j < size; ++j) squares += to_float(kept[i].v[j]) * to_float(kept[i].v[j]);
  }
  const float inverse = rsqrtf(block_sum(squares, shared) / args.hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    const Pack<T> w = load_pack(weight + at * size);
#pragma unroll
    for (int j = 0; j < size; ++j) kept[i].v[j] = from_float<T>(to_float(kept[i].v[j]) * inverse * (to_float(w.v[j]) + args.weight_offset));
    if (args.scale == nullptr) store_pack(static_cast<T*>(args.out) + token * args.out_stride + at * size, kept[i]);
  }
  if (args.scale != nullptr) write_fp8<T>(kept, packs, static_cast<fp8*>(args.out) + token * args.out_stride, args.scale + token, shared);
}

template <class T>
__global__ void __launch_bounds__(1024) quantize_kernel(NormArgs args) {
  __shared__ float shared[32];
  constexpr int size = Pack<T>::size;
  const int packs = args.hidden / size;
  const int64_t token = blockIdx.x;
  let_next_start();
  wait_for_inputs();
  Pack<T> kept[kMaxPacks];
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    kept[i] = load_pack(static_cast<const T*>(args.x) + token * args.x_stride + at * size);
  }
  write_fp8<T>(kept, packs, static_cast<fp8*>(args.out) + token * args.out_stride, args.scale + token, shared);
}

// Launches one block per token. Many tokens fill the device by themselves; few want all threads on each.
template <class T>
void run(void (*kernel)(NormArgs), const char* name, const NormArgs& args, Stream stream) {
  constexpr int size = Pack<T>::size;
  const int packs = args.hidden / size;
  if (args.hidden % size != 0 || packs > 1024 * kMaxPacks) {
    throw std::invalid_argument(std::string(name) + " takes widths that " + std::to_string(size) + " divides, up to " +
                                std::to_string(1024 * kMaxPacks * size) + "; got " + std::to_string(args.hidden));
  }
  const int wanted = args.tokens >= 512 ? (packs + 3) / 4 : packs;
  const int least = (packs + kMaxPacks - 1) / kMaxPacks;
  int threads = wanted < 1024 ? wanted : 1024;
  if (threads < least) threads = least;
  launch(kernel, dim3(args.tokens), dim3((threads + 31) / 32 * 32), 0, stream, args);
}

}  // namespace

void rms_norm(const NormArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  with_type(args.type, [&](auto zero) { run<decltype(zero)>(rms_norm_kernel<decltype(zero)>, "rms_norm", args, stream); });
}

void quantize_rows(const NormArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  with_type(args.type, [&](auto zero) { run<decltype(zero)>(quantize_kernel<decltype(zero)>, "quantize_rows", args, stream); });
}

}  // namespace trireme::cuda
