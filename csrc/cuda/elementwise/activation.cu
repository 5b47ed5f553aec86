// Activations of the feed-forward network, with and without a gate.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

template <Gate gate>
__device__ __forceinline__ float activate(float x) {
  if constexpr (gate == Gate::silu) return x / (1.0f + __expf(-x));
  if constexpr (gate == Gate::relu) return x < 0.0f ? 0.0f : x;  // NaN propagates
  if constexpr (gate == Gate::gelu_tanh) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

template <class T, Gate gate, bool kIsGated>
__global__ void activation_kernel(GatedArgs args, int first) {
  pdl_launch_dependents();
  pdl_wait();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::size;
  const int64_t token = first + blockIdx.y;
  const float row = row_scale(args.scales, token);
  float largest = 0.0f;
  if (at < args.width) {
    const T* p = static_cast<const T*>(args.gate_up) + token * args.stride + at;
    const Wide<T> x = load_scaled(p, args.scales, row, at);
    Wide<T> up;
    if constexpr (kIsGated) up = load_scaled(p + args.width, args.scales, row, args.width + at);
    Pack<T> result;
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
      result.v[i] = from_float<T>(kIsGated ? activate<gate>(x.v[i]) * up.v[i] : activate<gate>(x.v[i]));
      largest = larger(largest, fabsf(to_float(result.v[i])));
    }
    store_pack(static_cast<T*>(args.out) + token * args.out_stride + at, result);
  }
  if (args.largest == nullptr) return;
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) note_largest(args.largest + token, largest);
}

template <class T, Gate gate, bool kIsGated>
void run(const GatedArgs& args, Stream stream) {
  constexpr int size = Pack<T>::size, threads = 256;
  const int packs = args.width / size;
  for (int first = 0; first < args.tokens; first += 65535) {  // limit of a grid's second dimension
    const int count = args.tokens - first < 65535 ? args.tokens - first : 65535;
    launch(activation_kernel<T, gate, kIsGated>, dim3((packs + threads - 1) / threads, count), dim3(threads), 0, stream, args, first);
  }
}

template <bool kIsGated>
void run_any(const char* op, const GatedArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    need_packs<T>(op, args.width);
    switch (args.gate) {
      case Gate::silu: return run<T, Gate::silu, kIsGated>(args, stream);
      case Gate::gelu_tanh: return run<T, Gate::gelu_tanh, kIsGated>(args, stream);
      case Gate::gelu: return run<T, Gate::gelu, kIsGated>(args, stream);
      case Gate::relu: return run<T, Gate::relu, kIsGated>(args, stream);
    }
  });
}

}  // namespace

void gated_activation(const GatedArgs& args, Stream stream) { run_any<true>("gated_activation", args, stream); }

void activation(const GatedArgs& args, Stream stream) { run_any<false>("activation", args, stream); }

}  // namespace trireme::cuda
