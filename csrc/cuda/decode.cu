// Attention of one query per row over the paged cache, bound by reading keys and values once.
//
// A block serves one row and one KV head: the query heads of that head's group are the 16 rows (padded) of tensor-core tiles. Its
// four warps take turns over pieces of 16 tokens, each with its own online softmax (Milakov and Gimelshein 2018), cp.async
// fetching the next pieces meanwhile; they are folded at the end in order. Long contexts are cut in `splits` parts that run side
// by side and are folded by a second kernel (Flash-Decoding, Dao et al. 2023).
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kPiece = 16;   // tokens
constexpr int kStages = 3;
constexpr int kGroup = 16;   // query heads of a tile
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_valid) {
  const int bytes = is_valid ? 16 : 0;  // the rest becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)));
}

template <class T>
struct Math;
template <>
struct Math<bf16> {
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};
template <>
struct Math<f16> {
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

// Rows of 16-byte chunks in shared memory, permuted so that eight rows of one column lie in different banks.
template <int D>
struct Layout {
  static constexpr int chunks = D / 8;
  static constexpr int stride = (chunks + 7) / 8 * 8;  // chunks of a row
  static constexpr int piece_bytes = kPiece * stride * 16;
  static constexpr int stage_bytes = 2 * piece_bytes;  // keys, values
  static constexpr int warp_bytes = kStages * stage_bytes;
  static constexpr int bytes = kWarps * warp_bytes > kWarps * kGroup * (D + 2) * 4 ? kWarps * warp_bytes : kWarps * kGroup * (D + 2) * 4;
  static __device__ __forceinline__ int at(int token, int chunk) { return (token * stride + (chunk ^ (token & 7))) * 16; }
};

struct Span {
  int first, last;  // pieces
};

__device__ __forceinline__ Span pieces_of(int context, int window, int splits, int split) {
  const int begin = window > 0 && context > window ? (context - window) / kPiece : 0, end = (context + kPiece - 1) / kPiece;
  const int each = (end - begin + splits - 1) / splits;
  const int first = min(begin + split * each, end);
  return {first, min(first + each, end)};
}

template <class T, int D>
__device__ __forceinline__ void fetch_piece(const DecodeArgs& args, const int32_t* table, int kv_head, int piece, int context, char* stage) {
  using L = Layout<D>;
  const int lane = threadIdx.x % 32;
  const int64_t token_stride = D, block_stride = static_cast<int64_t>(args.cache.heads) * args.cache.block_size * D;
#pragma unroll
  for (int i = lane; i < kPiece * L::chunks; i += 32) {
    const int token = i / L::chunks, chunk = i % L::chunks;
    const int position = piece * kPiece + token;
    const bool is_valid = position < context;
    const int safe = is_valid ? position : context - 1;
    const int64_t block = table[safe / args.cache.block_size];
    const int64_t offset = block * block_stride + (static_cast<int64_t>(kv_head) * args.cache.block_size + safe % args.cache.block_size) * token_stride + chunk * 8;
    copy_async(stage + L::at(token, chunk), static_cast<const T*>(args.cache.k) + offset, is_valid);
    copy_async(stage + L::piece_bytes + L::at(token, chunk), static_cast<const T*>(args.cache.v) + offset, is_valid);
  }
}

// Two rows of a tile that a thread has part in: g and g + 8.
template <int D>
struct State {
  float out[D / 8][4];
  float top[2], sum[2];
};

template <class T, int D>
__device__ __forceinline__ void attend_piece(const DecodeArgs& args, const uint32_t (&q)[D / 16][4], const char* stage, int piece, int context, State<D>& s) {
  using L = Layout<D>;
  const int lane = threadIdx.x % 32, t = lane % 4, matrix = lane / 8, row = lane % 8;
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t b[4];
    load_matrices(b, stage + L::at(matrix / 2 * 8 + row, step * 2 + matrix % 2));
    Math<T>::multiply(scores[0], q[step], b[0], b[1]);
    Math<T>::multiply(scores[1], q[step], b[2], b[3]);
  }
  const int start = piece * kPiece, first_seen = args.window > 0 ? context - args.window : 0;
  float top[2] = {s.top[0], s.top[1]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = start + n * 8 + t * 2 + i % 2;
      float score = scores[n][i] * args.scale;
      if (args.softcap > 0.0f) score = args.softcap * tanhf(score / args.softcap);
      score = position < context && position >= first_seen ? score * kLog2e : -INFINITY;
      scores[n][i] = score;
      top[i / 2] = fmaxf(top[i / 2], score);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
    top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
    const float keep = top[half] == -INFINITY ? 1.0f : exp2f(s.top[half] - top[half]);
    s.top[half] = top[half];
    s.sum[half] *= keep;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      s.out[n][2 * half] *= keep;
      s.out[n][2 * half + 1] *= keep;
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = s.top[i / 2] == -INFINITY ? 0.0f : exp2f(scores[n][i] - s.top[i / 2]);
      scores[n][i] = weight;
      s.sum[i / 2] += weight;
    }
  }
  const uint32_t weights[4] = {Math<T>::pair(scores[0][0], scores[0][1]), Math<T>::pair(scores[0][2], scores[0][3]),
                               Math<T>::pair(scores[1][0], scores[1][1]), Math<T>::pair(scores[1][2], scores[1][3])};
#pragma unroll
  for (int n = 0; n < D / 16; ++n) {
    uint32_t b[4];
    load_transposed(b, stage + L::piece_bytes + L::at(matrix % 2 * 8 + row, n * 2 + matrix / 2));
    Math<T>::multiply(s.out[2 * n], weights, b[0], b[1]);
    Math<T>::multiply(s.out[2 * n + 1], weights, b[2], b[3]);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kWarps * 32) decode_kernel(DecodeArgs args) {
  using L = Layout<D>;
  extern __shared__ __align__(128) char shared[];
  const int row = blockIdx.x, group = args.q_heads / args.cache.heads, tiles = (group + kGroup - 1) / kGroup;
  const int kv_head = blockIdx.y / tiles, first_head = kv_head * group + blockIdx.y % tiles * kGroup;
  const int num_heads = min(kGroup, (kv_head + 1) * group - first_head), split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  char* own = shared + warp * L::warp_bytes;
  wait_for_inputs();
  let_next_start();
  const int context = args.context_len[row];
  const int32_t* table = args.block_table + static_cast<int64_t>(row) * args.table_stride;
  const Span span = context > 0 ? pieces_of(context, args.window, args.splits, split) : Span{0, 0};

  int ahead = span.first + warp;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i, ahead += kWarps) {
    if (ahead < span.last) fetch_piece<T, D>(args, table, kv_head, ahead, context, own + i * L::stage_bytes);
    commit();
  }
  uint32_t q[D / 16][4];
  const T* query = static_cast<const T*>(args.q) + row * args.q_stride + static_cast<int64_t>(first_head) * D;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = g + i % 2 * 8, dim = step * 16 + i / 2 * 8 + t * 2;
      q[step][i] = head < num_heads ? *reinterpret_cast<const uint32_t*>(query + head * D + dim) : 0u;
    }
  }
  State<D> s;
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s.out[n][i] = 0.0f;
  }
  s.top[0] = s.top[1] = -INFINITY;
  s.sum[0] = s.sum[1] = 0.0f;
  int stage = 0;
  for (int piece = span.first + warp; piece < span.last; piece += kWarps, ahead += kWarps) {
    const int next = stage == 0 ? kStages - 1 : stage - 1;
    __syncwarp();  // all lanes are done with the stage that is filled now
    if (ahead < span.last) fetch_piece<T, D>(args, table, kv_head, ahead, context, own + next * L::stage_bytes);
    commit();
    wait_for_copies<kStages - 1>();
    __syncwarp();
    attend_piece<T, D>(args, q, own + stage * L::stage_bytes, piece, context, s);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    s.sum[half] += __shfl_xor_sync(0xffffffffu, s.sum[half], 1);
    s.sum[half] += __shfl_xor_sync(0xffffffffu, s.sum[half], 2);
  }
  wait_for_copies<0>();
  __syncthreads();  // the stages become room for the warps' results
  float* results = reinterpret_cast<float*>(shared);  // [kWarps][kGroup][D + 2]
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) results[(warp * kGroup + g + i / 2 * 8) * (D + 2) + n * 8 + t * 2 + i % 2] = s.out[n][i];
  }
  if (t == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      results[(warp * kGroup + g + half * 8) * (D + 2) + D] = s.top[half];
      results[(warp * kGroup + g + half * 8) * (D + 2) + D + 1] = s.sum[half];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_heads * D; i += kWarps * 32) {
    const int head = i / D, dim = i % D;
    float top = -INFINITY, sum = 0.0f, total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, results[(w * kGroup + head) * (D + 2) + D]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* r = results + (w * kGroup + head) * (D + 2);
      const float factor = r[D] == -INFINITY ? 0.0f : exp2f(r[D] - top);
      sum += r[D + 1] * factor;
      total += r[dim] * factor;
    }
    const int q_head = first_head + head;
    if (args.splits > 1) {
      float* record = args.partial + ((static_cast<int64_t>(row) * args.q_heads + q_head) * args.splits + split) * (D + 2);
      record[dim] = total;
      if (dim == 0) {
        record[D] = top;
        record[D + 1] = sum;
      }
    } else {
      if (args.sinks != nullptr && sum > 0.0f) sum += exp2f(args.sinks[q_head] * kLog2e - top);
      static_cast<T*>(args.out)[row * args.out_stride + static_cast<int64_t>(q_head) * D + dim] = from_float<T>(sum > 0.0f ? total / sum : 0.0f);
    }
  }
}

template <class T>
__global__ void fold_kernel(DecodeArgs args) {
  const int row = blockIdx.x, head = blockIdx.y, dim = threadIdx.x, D = args.cache.dim;
  wait_for_inputs();
  let_next_start();
  const float* records = args.partial + (static_cast<int64_t>(row) * args.q_heads + head) * args.splits * (D + 2);
  float top = -INFINITY;
  for (int i = 0; i < args.splits; ++i) top = fmaxf(top, records[i * (D + 2) + D]);
  float sum = 0.0f, total = 0.0f;
  for (int i = 0; i < args.splits; ++i) {
    const float* r = records + i * (D + 2);
    if (r[D] == -INFINITY) continue;
    const float factor = exp2f(r[D] - top);
    sum += r[D + 1] * factor;
    total += r[dim] * factor;
  }
  if (args.sinks != nullptr && sum > 0.0f) sum += exp2f(args.sinks[head] * kLog2e - top);
  static_cast<T*>(args.out)[row * args.out_stride + static_cast<int64_t>(head) * D + dim] = from_float<T>(sum > 0.0f ? total / sum : 0.0f);
}

template <class T, int D>
void run(const DecodeArgs& args, Stream stream) {
  static const cudaError_t allowed = cudaFuncSetAttribute(decode_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<D>::bytes);
  check(allowed, "shared memory of decode_attention");
  const int tiles = (args.q_heads / args.cache.heads + kGroup - 1) / kGroup;
  launch(decode_kernel<T, D>, dim3(args.rows, args.cache.heads * tiles, args.splits), dim3(kWarps * 32), Layout<D>::bytes, stream, args);
  if (args.splits > 1) launch(fold_kernel<T>, dim3(args.rows, args.q_heads), dim3(D), 0, stream, args);
}

}  // namespace

int64_t decode_scratch_floats(int rows, int q_heads, int dim, int splits) {
  return splits > 1 ? static_cast<int64_t>(rows) * q_heads * splits * (dim + 2) : 0;
}

void decode_attention(const DecodeArgs& args, Stream stream) {
  if (args.rows < 1) return;
  if (args.cache.type != args.type) throw std::invalid_argument("decode_attention takes a cache of the type of the queries");
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    switch (args.cache.dim) {
      case 64: return run<T, 64>(args, stream);
      case 80: return run<T, 80>(args, stream);
      case 96: return run<T, 96>(args, stream);
      case 128: return run<T, 128>(args, stream);
      case 256: return run<T, 256>(args, stream);
      default: throw std::invalid_argument("decode_attention has head dims 64, 80, 96, 128, 256; got " + std::to_string(args.cache.dim));
    }
  });
}

}  // namespace trireme::cuda
