// Gated activations of the feed-forward network; rounded to fp8 or int8 in the same pass they take a block per token.
#include "cuda/rounding.cuh"

namespace trireme::cuda {
namespace {

template <Gate gate>
__device__ __forceinline__ float activate(float x) {
  if constexpr (gate == Gate::silu) return x / (1.0f + __expf(-x));
  if constexpr (gate == Gate::gelu_tanh) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

// From column `at` on; `row` is the token's own factor.
template <class T, Gate gate>
__device__ __forceinline__ Pack<T> gated(const GatedArgs& args, int64_t token, float row, int at) {
  const T* p = static_cast<const T*>(args.gate_up) + token * args.stride + at;
  const Wide<T> a = load_scaled(p, args.scales, row, at), b = load_scaled(p + args.width, args.scales, row, args.width + at);
  Pack<T> result;
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) result.v[i] = from_float<T>(activate<gate>(a.v[i]) * b.v[i]);
  return result;
}

template <class T, Gate gate>
__global__ void gated_kernel(GatedArgs args, int first) {
  let_next_start();
  wait_for_inputs();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::size;
  if (at >= args.width) return;
  const int64_t token = first + blockIdx.y;
  store_pack(static_cast<T*>(args.out) + token * args.out_stride + at, gated<T, gate>(args, token, row_scale(args.scales, token), at));
}

template <class T, Gate gate>
__global__ void __launch_bounds__(1024) gated_narrow_kernel(GatedArgs args) {
  __shared__ float shared[32];
  const int packs = args.width / Pack<T>::size;
  const int64_t token = blockIdx.x;
  let_next_start();
  wait_for_inputs();
  const float row = row_scale(args.scales, token);
  Kept<T> kept;
#pragma unroll
  for (int i = 0; i < kMaxPacks; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= packs) break;
    kept.set(i, gated<T, gate>(args, token, row, at * Pack<T>::size));
  }
  write_narrow<T>(kept, packs, args.narrow, args.out, token * args.out_stride, args.scale + token, shared);
}

template <class T, Gate gate>
void run(const GatedArgs& args, Stream stream) {
  if (args.scale != nullptr) return launch_rows<T>("gated_activation", gated_narrow_kernel<T, gate>, args.tokens, args.width, args, stream);
  constexpr int size = Pack<T>::size, threads = 256;
  const int packs = args.width / size;
  for (int first = 0; first < args.tokens; first += 65535) {  // limit of a grid's second dimension
    const int count = args.tokens - first < 65535 ? args.tokens - first : 65535;
    launch(gated_kernel<T, gate>, dim3((packs + threads - 1) / threads, count), dim3(threads), 0, stream, args, first);
  }
}

}  // namespace

void gated_activation(const GatedArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  if (args.scale != nullptr) need_narrow("gated_activation", args.narrow);
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    need_packs<T>("gated_activation", args.width);
    switch (args.gate) {
      case Gate::silu: return run<T, Gate::silu>(args, stream);
      case Gate::gelu_tanh: return run<T, Gate::gelu_tanh>(args, stream);
      case Gate::gelu: return run<T, Gate::gelu>(args, stream);
    }
  });
}

}  // namespace trireme::cuda
