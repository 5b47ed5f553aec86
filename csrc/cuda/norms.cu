// RMS norms, with the addition to the residual before and the quantization to fp8 after in the same pass. One block per token.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kMaxPacks = 8;  // of one thread, kept in registers between the two passes

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
  wait_for_inputs();
  let_next_start();
  Pack<T> kept[kMaxPacks];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    kept[i] = load_pack(x + at * size);
    if (residual != nullptr) {
      const Pack<T> before = load_pack(residual + at * size);
#pragma unroll
      for (int j = 0; j < size; ++j) kept[i].v[j] = from_float<T>(to_float(kept[i].v[j]) + to_float(before.v[j]));
      store_pack(residual + at * size, kept[i]);
    }
#pragma unroll
    for (int j = 0; j < size; ++j) squares += to_float(kept[i].v[j]) * to_float(kept[i].v[j]);
  }
  const float inverse = rsqrtf(block_sum(squares, shared) / args.hidden + args.eps);
  if (args.scale == nullptr) {
    T* out = static_cast<T*>(args.out) + token * args.out_stride;
#pragma unroll
    for (int i = 0; i < kMaxPacks; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      if (at >= packs) break;
      const Pack<T> w = load_pack(weight + at * size);
#pragma unroll
      for (int j = 0; j < size; ++j) kept[i].v[j] = from_float<T>(to_float(kept[i].v[j]) * inverse * (to_float(w.v[j]) + args.weight_offset));
      store_pack(out + at * size, kept[i]);
    }
    return;
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    const Pack<T> w = load_pack(weight + at * size);
#pragma unroll
    for (int j = 0; j < size; ++j) {
      kept[i].v[j] = from_float<T>(to_float(kept[i].v[j]) * inverse * (to_float(w.v[j]) + args.weight_offset));
      largest = fmaxf(largest, fabsf(to_float(kept[i].v[j])));
    }
  }
  largest = warp_max(largest);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = warp_max(threadIdx.x % 32 < (blockDim.x + 31) / 32 ? shared[threadIdx.x % 32] : 0.0f);
  const float scale = fmaxf(largest, 1e-12f) / 448.0f;
  if (threadIdx.x == 0) args.scale[token] = scale;
  fp8* out = static_cast<fp8*>(args.out) + token * args.out_stride;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
#pragma unroll
    for (int j = 0; j < size; ++j) out[at * size + j] = from_float<fp8>(to_float(kept[i].v[j]) / scale);
  }
}

}  // namespace

void rms_norm(const NormArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int size = Pack<T>::size;
    const int packs = args.hidden / size;
    if (args.hidden % size != 0 || packs > 1024 * kMaxPacks) {
      throw std::invalid_argument("rms_norm takes widths that " + std::to_string(size) + " divides, up to " + std::to_string(1024 * kMaxPacks * size) +
                                  "; got " + std::to_string(args.hidden));
    }
    // Many tokens fill the device by themselves; few want all threads on each.
    const int wanted = args.tokens >= 512 ? (packs + 3) / 4 : packs;
    const int least = (packs + kMaxPacks - 1) / kMaxPacks;
    int threads = wanted < 1024 ? wanted : 1024;
    if (threads < least) threads = least;
    threads = (threads + 31) / 32 * 32;
    launch(rms_norm_kernel<T>, dim3(args.tokens), dim3(threads), 0, stream, args);
  });
}

}  // namespace trireme::cuda
