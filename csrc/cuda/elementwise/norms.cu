// RMS and layer norms, fused with the residual add before and quantization to fp8 or int8 after. One CTA per token.
#include "cuda/elementwise/quantize.cuh"

namespace trireme::cuda {
namespace {

// Layer norm subtracts the mean.
template <class T, bool kIsCentred>
__device__ __forceinline__ void norm_row(const NormArgs& args) {
  __shared__ float shared[32];
  constexpr int size = Pack<T>::size;
  const int packs = args.hidden / size;
  const int64_t token = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  T* residual = static_cast<T*>(args.residual);
  if (residual != nullptr) residual += token * args.residual_stride;
  const T* weight = static_cast<const T*>(args.weight);
  pdl_launch_dependents();
  pdl_wait();
  const float row = row_scale(args.x_scales, token);
  Kept<T> kept;
  float squares = 0.0f, total = 0.0f, mean = 0.0f;
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
    Pack<T> sum;
#pragma unroll
    for (int j = 0; j < size; ++j) sum.v[j] = from_float<T>(wide.v[j]);
    kept.set(i, sum);
    if (residual != nullptr) store_pack(residual + at * size, sum);
#pragma unroll
    for (int j = 0; j < size; ++j) {
      if constexpr (kIsCentred) {
        total += to_float(sum.v[j]);
      } else {
        squares += to_float(sum.v[j]) * to_float(sum.v[j]);
      }
    }
  }
  if constexpr (kIsCentred) {
    mean = block_sum(total, shared) / args.hidden;
#pragma unroll
    for (int i = 0; i < kMaxPacks; ++i) {
      if (threadIdx.x + i * blockDim.x >= packs) break;
      const Pack<T> sum = kept[i];
#pragma unroll
      for (int j = 0; j < size; ++j) squares += (to_float(sum.v[j]) - mean) * (to_float(sum.v[j]) - mean);
    }
  }
  const float inverse = rsqrtf(block_sum(squares, shared) / args.hidden + args.eps);
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    const Pack<T> w = load_pack(weight + at * size), before = kept[i];
    Pack<T> normed, added{};
    if constexpr (kIsCentred) {
      if (args.bias != nullptr) added = load_pack(static_cast<const T*>(args.bias) + at * size);
    }
#pragma unroll
    for (int j = 0; j < size; ++j) {
      float value = to_float(before.v[j]);
      if constexpr (kIsCentred) value -= mean;
      value = value * inverse * (to_float(w.v[j]) + args.weight_offset);
      if constexpr (kIsCentred) value += to_float(added.v[j]);
      normed.v[j] = from_float<T>(value);
    }
    kept.set(i, normed);
    if (args.scale == nullptr) store_pack(static_cast<T*>(args.out) + token * args.out_stride + at * size, normed);
  }
  if (args.scale != nullptr) write_narrow<T>(kept, packs, args.narrow, args.out, token * args.out_stride, args.scale + token, shared);
}

template <class T>
__global__ void __launch_bounds__(1024) rms_norm_kernel(NormArgs args) { norm_row<T, false>(args); }

template <class T>
__global__ void __launch_bounds__(1024) layer_norm_kernel(NormArgs args) { norm_row<T, true>(args); }

template <class T>
__global__ void __launch_bounds__(1024) quantize_kernel(NormArgs args) {
  __shared__ float shared[32];
  constexpr int size = Pack<T>::size;
  const int packs = args.hidden / size;
  const int64_t token = blockIdx.x;
  pdl_launch_dependents();
  pdl_wait();
  Kept<T> kept;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    kept.set(i, load_pack(static_cast<const T*>(args.x) + token * args.x_stride + at * size));
  }
  write_narrow<T>(kept, packs, args.narrow, args.out, token * args.out_stride, args.scale + token, shared);
}

// Quantization of tokens whose amax is known: independent CTAs, no reduction.
template <class T, class N>
__global__ void round_kernel(NormArgs args) {
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::size;
  const int64_t token = blockIdx.y;
  pdl_launch_dependents();
  pdl_wait();
  if (at >= args.hidden) return;
  const Pack<T> pack = load_pack(static_cast<const T*>(args.x) + token * args.x_stride + at);
  const Rounding<N> rounded(args.largest[token]);
  if (at == 0) args.scale[token] = rounded.scale;
  store_rounded(pack, rounded, static_cast<N*>(args.out) + token * args.out_stride + at);
}

template <class T, class N>
void round_rows(const NormArgs& args, Stream stream) {
  constexpr int threads = 256, most = 65535;  // limit of a grid's second dimension
  need_packs<T>("quantize_rows", args.hidden);
  if (args.tokens > most) throw std::invalid_argument("quantize_rows takes up to 65535 rows whose largest magnitude is known; got " + std::to_string(args.tokens));
  launch(round_kernel<T, N>, dim3((args.hidden / Pack<T>::size + threads - 1) / threads, args.tokens), dim3(threads), 0, stream, args);
}

template <bool kIsCentred>
void run_norm(const char* op, const NormArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  if (args.scale != nullptr) need_narrow(op, args.narrow);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    launch_rows<T>(op, kIsCentred ? layer_norm_kernel<T> : rms_norm_kernel<T>, args.tokens, args.hidden, args, stream);
  });
}

}  // namespace

void rms_norm(const NormArgs& args, Stream stream) { run_norm<false>("rms_norm", args, stream); }

void layer_norm(const NormArgs& args, Stream stream) { run_norm<true>("layer_norm", args, stream); }

void quantize_rows(const NormArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  need_narrow("quantize_rows", args.narrow);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.largest != nullptr) return args.narrow == Type::int8 ? round_rows<T, int8_t>(args, stream) : round_rows<T, fp8>(args, stream);
    launch_rows<T>("quantize_rows", quantize_kernel<T>, args.tokens, args.hidden, args, stream);
  });
}

}  // namespace trireme::cuda
