// Gated activations of the feed-forward network.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

template <Gate gate>
__device__ __forceinline__ float activate(float x) {
  if constexpr (gate == Gate::silu) return x / (1.0f + __expf(-x));
  if constexpr (gate == Gate::gelu_tanh) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

template <class T, Gate gate>
__global__ void gated_kernel(const T* gate_up, int64_t stride, T* out, int64_t out_stride, int width) {
  constexpr int size = Pack<T>::size;
  wait_for_inputs();
  let_next_start();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * size;
  if (at >= width) return;
  const int64_t token = blockIdx.y;
  const Pack<T> a = load_pack(gate_up + token * stride + at), b = load_pack(gate_up + token * stride + width + at);
  Pack<T> result;
#pragma unroll
  for (int i = 0; i < size; ++i) result.v[i] = from_float<T>(activate<gate>(to_float(a.v[i])) * to_float(b.v[i]));
  store_pack(out + token * out_stride + at, result);
}

template <class T, Gate gate>
void run(const void* gate_up, int64_t stride, void* out, int64_t out_stride, int tokens, int width, Stream stream) {
  constexpr int size = Pack<T>::size, threads = 256;
  const int packs = width / size;
  for (int first = 0; first < tokens; first += 65535) {  // limit of a grid's second dimension
    const int count = tokens - first < 65535 ? tokens - first : 65535;
    launch(gated_kernel<T, gate>, dim3((packs + threads - 1) / threads, count), dim3(threads), 0, stream,
           static_cast<const T*>(gate_up) + first * stride, stride, static_cast<T*>(out) + first * out_stride, out_stride, width);
  }
}

}  // namespace

void gated_activation(const void* gate_up, int64_t stride, void* out, int64_t out_stride, int tokens, int width, Gate gate, Type type,
                      Stream stream) {
  if (tokens < 1) return;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    need_packs<T>("gated_activation", width);
    switch (gate) {
      case Gate::silu: return run<T, Gate::silu>(gate_up, stride, out, out_stride, tokens, width, stream);
      case Gate::gelu_tanh: return run<T, Gate::gelu_tanh>(gate_up, stride, out, out_stride, tokens, width, stream);
      case Gate::gelu: return run<T, Gate::gelu>(gate_up, stride, out, out_stride, tokens, width, stream);
    }
  });
}

}  // namespace trireme::cuda
