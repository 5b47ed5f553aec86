// Rotary embedding (NeoX pairing), per-head norms before it, and the cache write. Whole heads of common sizes move as 16-byte packs, a
// few lanes per head; any other head takes a warp.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kMaxDim = 256;
constexpr int kPer = kMaxDim / 32;  // values per lane
constexpr int kWarps = 4;

// A head's values: a lane holds dims lane, lane + 32, ...
struct Head {
  float v[kPer];
};

// `first` is the head's first column among those of q, k and v.
template <class T>
__device__ __forceinline__ Head load_head(const T* p, int dim, const Scales& scales, float row, int first) {
  Head head;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int d = threadIdx.x + 32 * i;
    head.v[i] = d < dim ? to_float(p[d]) : 0.0f;
    if (scales.columns != nullptr && d < dim) head.v[i] *= row * scales.columns[first + d];
  }
  return head;
}

template <class T>
__device__ __forceinline__ void store_head(T* p, const Head& head, int dim) {
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int d = threadIdx.x + 32 * i;
    if (d < dim) p[d] = from_float<T>(head.v[i]);
  }
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

// Through shared memory, since the partner of a dim may be in any lane.
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
  pdl_launch_dependents();
  pdl_wait();
  if (head >= heads) return;
  const int64_t token = blockIdx.x;
  const int slot = args.slots[token];
  const float row = row_scale(args.scales, token);
  if (head < args.q_heads) {
    T* q = static_cast<T*>(args.q) + token * args.q_stride + head * dim;
    Head values = load_head(q, dim, args.scales, row, head * dim);
    if (args.q_norm != nullptr) norm_head(values, static_cast<const T*>(args.q_norm), dim, args.eps);
    rotate_head(values, args.cos_sin + args.positions[token] * args.cos_sin_stride, args.rotary, scratch[threadIdx.y]);
    store_head(q, values, dim);
    return;
  }
  const int kv_head = (head - args.q_heads) % args.cache.heads;
  if (head < args.q_heads + args.cache.heads) {
    T* k = static_cast<T*>(args.k) + token * args.k_stride + kv_head * dim;
    Head values = load_head(k, dim, args.scales, row, head * dim);
    if (args.k_norm != nullptr) norm_head(values, static_cast<const T*>(args.k_norm), dim, args.eps);
    rotate_head(values, args.cos_sin + args.positions[token] * args.cos_sin_stride, args.rotary, scratch[threadIdx.y]);
    store_head(k, values, dim);
    if (slot >= 0) write_cache<C>(values, args.cache, args.cache.k, 1.0f / args.cache.k_scale, slot, kv_head);
  } else {
    T* v = static_cast<T*>(args.v) + token * args.v_stride + kv_head * dim;
    const Head values = load_head(v, dim, args.scales, row, head * dim);
    if (args.scales.columns != nullptr) store_head(v, values, dim);
    if (slot >= 0) write_cache<C>(values, args.cache, args.cache.v, 1.0f / args.cache.v_scale, slot, kv_head);
  }
}

// A lane's part of a head: as many dims of its first half as of its second, which form the pairs.
template <class T>
struct Halves {
  static constexpr int size = Pack<T>::size;
  float a[size], b[size];
};

template <class T>
__device__ __forceinline__ Halves<T> load_halves(const T* p, int half, const Scales& scales = {}, float row = 1.0f, int column = 0) {
  const Wide<T> first = load_scaled(p, scales, row, column), second = load_scaled(p + half, scales, row, column + half);
  Halves<T> x;
#pragma unroll
  for (int i = 0; i < Halves<T>::size; ++i) x.a[i] = first.v[i], x.b[i] = second.v[i];
  return x;
}

// Values of another type, as many as in a pack of T.
template <class C, int Count>
struct alignas(sizeof(C) * Count) Part {
  C v[Count];
};

template <class C, class T>
__device__ __forceinline__ void store_halves(C* p, int half, const Halves<T>& x, float factor) {
  using P = Part<C, Halves<T>::size>;
  P first, second;
#pragma unroll
  for (int i = 0; i < Halves<T>::size; ++i) first.v[i] = from_float<C>(x.a[i] * factor), second.v[i] = from_float<C>(x.b[i] * factor);
  *reinterpret_cast<P*>(p) = first;
  *reinterpret_cast<P*>(p + half) = second;
}

template <class T, int Lanes>
__device__ __forceinline__ void norm_halves(Halves<T>& x, const T* weight, int half, float eps) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < Halves<T>::size; ++i) squares += x.a[i] * x.a[i] + x.b[i] * x.b[i];
#pragma unroll
  for (int lane = Lanes / 2; lane > 0; lane /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, lane);
  const float inverse = rsqrtf(squares / (2 * half) + eps);
  const Halves<T> w = load_halves(weight, half);
#pragma unroll
  for (int i = 0; i < Halves<T>::size; ++i) {
    x.a[i] = to_float(from_float<T>(x.a[i] * inverse * w.a[i]));
    x.b[i] = to_float(from_float<T>(x.b[i] * inverse * w.b[i]));
  }
}

// Head dims D that are rotated whole. A CTA loops over the heads of one token, so that its table entry is read once.
template <class T, class C, int D>
__global__ void __launch_bounds__(32 * kWarps) whole_kernel(RotaryArgs args) {
  constexpr int size = Pack<T>::size, half = D / 2, lanes = half / size, slots = 32 * kWarps / lanes;
  static_assert(lanes <= 32 && (lanes & (lanes - 1)) == 0, "lanes of a head are a power of two of one warp");
  const int at = threadIdx.x % lanes * size, heads = args.q_heads + 2 * args.cache.heads, kv_heads = args.cache.heads;
  const int64_t token = blockIdx.x;
  pdl_launch_dependents();
  pdl_wait();
  const int slot = args.slots[token];
  const float row = row_scale(args.scales, token);
  const float* angles = args.cos_sin + args.positions[token] * args.cos_sin_stride + at;
  float cos[size], sin[size];
#pragma unroll
  for (int i = 0; i < size; i += 4) {
    const Pack<float> c = load_pack(angles + i), s = load_pack(angles + half + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) cos[i + j] = c.v[j], sin[i + j] = s.v[j];
  }
  const int64_t block = slot / args.cache.block_size, offset = slot % args.cache.block_size;
  for (int first = blockIdx.y * slots; first < heads; first += slots * gridDim.y) {
    const int head = first + threadIdx.x / lanes;
    const bool is_head = head < heads, is_q = head < args.q_heads, is_v = head >= args.q_heads + kv_heads;
    const int kv_head = is_q ? 0 : (head - args.q_heads) % kv_heads;
    T* v = static_cast<T*>(args.v) + token * args.v_stride + kv_head * D + at;
    T* turned = is_q ? static_cast<T*>(args.q) + token * args.q_stride + head * D + at : static_cast<T*>(args.k) + token * args.k_stride + kv_head * D + at;
    Halves<T> x{};
    if (is_head) x = load_halves(is_v ? v : turned, half, args.scales, row, head * D + at);
    if (args.q_norm != nullptr) {  // lanes of one head agree; all take part in the sum
      Halves<T> normed = x;
      norm_halves<T, lanes>(normed, static_cast<const T*>(is_q ? args.q_norm : args.k_norm) + at, half, args.eps);
      if (!is_v) x = normed;
    }
    if (!is_head) continue;
    if (!is_v) {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        const float a = x.a[i] * cos[i] - x.b[i] * sin[i];
        x.b[i] = x.b[i] * cos[i] + x.a[i] * sin[i];
        x.a[i] = a;
      }
      store_halves<T>(turned, half, x, 1.0f);
    } else if (args.scales.columns != nullptr) {
      store_halves<T>(v, half, x, 1.0f);
    }
    if (is_q || slot < 0) continue;
    C* base = static_cast<C*>(is_v ? args.cache.v : args.cache.k) + ((block * kv_heads + kv_head) * args.cache.block_size + offset) * D + at;
    store_halves<C>(base, half, x, 1.0f / (is_v ? args.cache.v_scale : args.cache.k_scale));
  }
}

constexpr int kManyTokens = 512;  // this many fill the GPU with one CTA each

template <class T, class C, int D>
void run_whole(const RotaryArgs& args, Stream stream) {
  constexpr int slots = 32 * kWarps / (D / 2 / Pack<T>::size);
  const int heads = args.q_heads + 2 * args.cache.heads;
  const int parts = args.tokens >= kManyTokens ? 1 : (heads + slots - 1) / slots;
  launch(whole_kernel<T, C, D>, dim3(args.tokens, parts), dim3(32 * kWarps), 0, stream, args);
}

// Whether every tensor is aligned to whole packs for every token.
template <class T>
bool has_packs(const RotaryArgs& args) {
  const int64_t strides = args.q_stride | args.k_stride | args.v_stride;
  const uintptr_t starts = reinterpret_cast<uintptr_t>(args.q) | reinterpret_cast<uintptr_t>(args.k) | reinterpret_cast<uintptr_t>(args.v);
  return strides % Pack<T>::size == 0 && starts % 16 == 0 && (args.q_norm == nullptr) == (args.k_norm == nullptr);
}

template <class T, class C>
void run(const RotaryArgs& args, Stream stream) {
  if (args.rotary == args.cache.dim && has_packs<T>(args)) {
    switch (args.cache.dim) {
      case 64: return run_whole<T, C, 64>(args, stream);
      case 128: return run_whole<T, C, 128>(args, stream);
      case 256: return run_whole<T, C, 256>(args, stream);
      default: break;
    }
  }
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
