// Rotary embedding (NeoX pairing), per-head norms before it, and the cache write. One warp per head of a token.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kMaxDim = 256;
constexpr int kPer = kMaxDim / 32;  // values of a lane
constexpr int kWarps = 4;

// A head's values, lane holds dims lane, lane + 32, ...
struct Head {
  float v[kPer];
};

template <class T>
__device__ __forceinline__ Head load_head(const T* p, int dim) {
  Head head;
#pragma unroll
  for (int i = 0; i < kPer; ++i) head.v[i] = threadIdx.x + 32 * i < dim ? to_float(p[threadIdx.x + 32 * i]) : 0.0f;
  return head;
}

template <class T>
__device__ __forceinline__ void norm_head(Head& head, const T* weight, int dim, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) squares += head.v[i] * head.v[i];
  const float inverse = rsqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int d = threadIdx.x + 32 * i;
    if (d < dim) head.v[i] = to_float(from_float<T>(head.v[i] * inverse * to_float(weight[d])));
  }
}

// Through shared memory, since the partner of a dim may lie in any lane.
__device__ __forceinline__ void rotate_head(Head& head, const float* cos_sin, int rotary, float* shared) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) shared[threadIdx.x + 32 * i] = head.v[i];
  __syncwarp();
  const int half = rotary / 2;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int d = threadIdx.x + 32 * i;
    if (d < half) {
      head.v[i] = head.v[i] * cos_sin[d] - shared[d + half] * cos_sin[half + d];
    } else if (d < rotary) {
      head.v[i] = head.v[i] * cos_sin[d - half] + shared[d - half] * cos_sin[d];
    }
  }
  __syncwarp();
}

template <class C>
__device__ __forceinline__ void write_cache(const Head& head, const PagedCache& cache, void* base, float inverse_scale, int slot, int kv_head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  C* out = static_cast<C*>(base) + ((block * cache.heads + kv_head) * cache.block_size + offset) * cache.dim;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int d = threadIdx.x + 32 * i;
    if (d < cache.dim) out[d] = from_float<C>(head.v[i] * inverse_scale);
  }
}

template <class T, class C>
__global__ void __launch_bounds__(32 * kWarps) rotary_kernel(RotaryArgs args) {
  __shared__ float scratch[kWarps][kMaxDim];
  const int dim = args.cache.dim, heads = args.q_heads + 2 * args.cache.heads;
  const int head = blockIdx.y * kWarps + threadIdx.y;
  wait_for_inputs();
  let_next_start();
  if (head >= heads) return;
  const int64_t token = blockIdx.x;
  const int slot = args.slots[token];
  if (head < args.q_heads) {
    T* q = static_cast<T*>(args.q) + token * args.q_stride + head * dim;
    Head values = load_head(q, dim);
    if (args.q_norm != nullptr) norm_head(values, static_cast<const T*>(args.q_norm), dim, args.eps);
    rotate_head(values, args.cos_sin + static_cast<int64_t>(args.positions[token]) * args.rotary, args.rotary, scratch[threadIdx.y]);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = threadIdx.x + 32 * i;
      if (d < dim) q[d] = from_float<T>(values.v[i]);
    }
    return;
  }
  if (slot < 0) return;
  const int kv_head = (head - args.q_heads) % args.cache.heads;
  if (head < args.q_heads + args.cache.heads) {
    Head values = load_head(static_cast<const T*>(args.k) + token * args.k_stride + kv_head * dim, dim);
    if (args.k_norm != nullptr) norm_head(values, static_cast<const T*>(args.k_norm), dim, args.eps);
    rotate_head(values, args.cos_sin + static_cast<int64_t>(args.positions[token]) * args.rotary, args.rotary, scratch[threadIdx.y]);
    write_cache<C>(values, args.cache, args.cache.k, 1.0f / args.cache.k_scale, slot, kv_head);
  } else {
    const Head values = load_head(static_cast<const T*>(args.v) + token * args.v_stride + kv_head * dim, dim);
    write_cache<C>(values, args.cache, args.cache.v, 1.0f / args.cache.v_scale, slot, kv_head);
  }
}

template <class T, class C>
void run(const RotaryArgs& args, Stream stream) {
  const int heads = args.q_heads + 2 * args.cache.heads;
  launch(rotary_kernel<T, C>, dim3(args.tokens, (heads + kWarps - 1) / kWarps), dim3(32, kWarps), 0, stream, args);
}

}  // namespace

void rotary_and_cache(const RotaryArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  if (args.cache.dim > kMaxDim || args.rotary > args.cache.dim || args.rotary % 2 != 0) {
    throw std::invalid_argument("rotary_and_cache takes head dims up to 256 and an even rotary part of them; got " + std::to_string(args.cache.dim) +
                                " and " + std::to_string(args.rotary));
  }
  with_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.cache.type == args.type) return run<T, T>(args, stream);
    if (args.cache.type == Type::fp8) return run<T, fp8>(args, stream);
    throw std::invalid_argument("the cache holds the type of the activations, or fp8");
  });
}

}  // namespace trireme::cuda
