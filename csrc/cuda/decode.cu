// Attention of one query per row over the paged cache, bound by reading keys and values once.
//
// A block serves one row and one KV head: the query heads of that head's group are the 16 rows (padded) of tensor-core tiles. Its
// four warps take turns over pieces of 16 tokens, each with its own online softmax (Milakov and Gimelshein 2018), cp.async
// fetching the next pieces meanwhile; they are folded at the end in order. Long contexts are cut in `splits` parts that run side
// by side and are folded by a second kernel (Flash-Decoding, Dao et al. 2023). The heads of a row run beside each other: their
// pieces are neighbours in memory.
#include "cuda/products.cuh"

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
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(p)));
}

// Rows of 16-byte chunks in shared memory, permuted so that eight rows of one column lie in different banks.
template <class C, int D>
struct Layout {
  static constexpr int per_chunk = 16 / sizeof(C);  // values
  static constexpr int chunks = D / per_chunk;
  static constexpr int stride = (chunks + 7) / 8 * 8;  // chunks of a row
  static constexpr int piece_bytes = kPiece * stride * 16;
  static constexpr int stage_bytes = 2 * piece_bytes;  // keys, values
  static constexpr int warp_bytes = kStages * stage_bytes;
  static constexpr int result_bytes = kWarps * kGroup * (D + 2) * 4;
  static constexpr int bytes = kWarps * warp_bytes > result_bytes ? kWarps * warp_bytes : result_bytes;
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

// Where a position of one KV head begins in the cache, in values.
__device__ __forceinline__ int64_t place_of(const PagedCache& cache, const int32_t* table, int kv_head, int position, int dim) {
  const int64_t block = table[position / cache.block_size];
  return ((block * cache.heads + kv_head) * cache.block_size + position % cache.block_size) * dim;
}

// Fetches the keys and values of a piece. Where blocks hold whole pieces these lie in a row.
template <class C, int D>
__device__ __forceinline__ void fetch_piece(const DecodeArgs& args, const int32_t* table, int kv_head, int piece, int context, char* stage) {
  using L = Layout<C, D>;
  const int lane = threadIdx.x % 32, start = piece * kPiece;
  const bool is_whole = args.cache.block_size % kPiece == 0;
  const int64_t first = is_whole ? place_of(args.cache, table, kv_head, start, D) : 0;
#pragma unroll
  for (int i = lane; i < kPiece * L::chunks; i += 32) {
    const int token = i / L::chunks, chunk = i % L::chunks, position = start + token;
    const bool is_valid = position < context;
    int64_t offset = first + token * D;
    if (!is_whole) offset = place_of(args.cache, table, kv_head, is_valid ? position : context - 1, D);
    copy_async(stage + L::at(token, chunk), static_cast<const C*>(args.cache.k) + offset + chunk * L::per_chunk, is_valid);
    copy_async(stage + L::piece_bytes + L::at(token, chunk), static_cast<const C*>(args.cache.v) + offset + chunk * L::per_chunk, is_valid);
  }
}

// Two rows of a tile that a thread has part in: g and g + 8.
template <int D>
struct State {
  float out[D / 8][4];
  float top[2], sum[2];
};

// How a piece of the cache becomes tensor-core fragments of `Element`, kUnit times the values stored. A tile's 16 steps of a dot
// product may be taken in any order that queries share; outputs land where out_dim says.
template <class C, int D>
struct Tiles {
  using Element = C;
  using L = Layout<C, D>;
  static constexpr float kUnit = 1.0f;

  static __device__ __forceinline__ int query_dim(int step, int i, int t, int which) { return step * 16 + i / 2 * 8 + t * 2 + which; }
  static __device__ __forceinline__ int out_dim(int n, int column) { return n * 8 + column; }

  static __device__ __forceinline__ void dot(float (&scores)[2][4], const uint32_t (&q)[D / 16][4], const char* keys) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t b[4];
      load_matrices(b, keys + L::at(matrix / 2 * 8 + row, step * 2 + matrix % 2));
      multiply<C>(scores[0], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
      multiply<C>(scores[1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
    }
  }

  static __device__ __forceinline__ void blend(float (&out)[D / 8][4], const uint32_t (&w)[4], const char* values) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t b[4];
      load_transposed(b, values + L::at(matrix % 2 * 8 + row, n * 2 + matrix / 2));
      multiply<C>(out[2 * n], w[0], w[1], w[2], w[3], b[0], b[1]);
      multiply<C>(out[2 * n + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
    }
  }
};

// float8: a 16-byte chunk holds the 16 dims of a step, four to a thread, and unpacks to those at even and at odd places. Of
// values, a transposed word has two neighbouring dims of two tokens, so even and odd dims become two tiles.
template <int D>
struct Tiles<fp8, D> {
  using Element = f16;
  using L = Layout<fp8, D>;
  static constexpr float kUnit = kFp8Unit<f16>;
  static_assert(D % 32 == 0, "chunks come in pairs");

  static __device__ __forceinline__ int query_dim(int step, int i, int t, int which) { return step * 16 + t * 4 + i / 2 + which * 2; }
  static __device__ __forceinline__ int out_dim(int n, int column) { return n / 2 * 16 + column * 2 + n % 2; }

  static __device__ __forceinline__ void dot(float (&scores)[2][4], const uint32_t (&q)[D / 16][4], const char* keys) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int both = 0; both < D / 32; ++both) {
      uint32_t words[4];
      load_matrices(words, keys + L::at(matrix / 2 * 8 + row, both * 2 + matrix % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Fp8Pairs b = unpack_fp8<f16>(words[i]);
        const uint32_t(&a)[4] = q[both * 2 + i % 2];
        multiply<f16>(scores[i / 2], a[0], a[1], a[2], a[3], b.even, b.odd);
      }
    }
  }

  static __device__ __forceinline__ void blend(float (&out)[D / 8][4], const uint32_t (&w)[4], const char* values) {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
#pragma unroll
    for (int both = 0; both < D / 32; ++both) {
      uint32_t words[4];
      load_transposed(words, values + L::at(matrix % 2 * 8 + row, both * 2 + matrix / 2));
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const Fp8Pairs first = unpack_fp8<f16>(words[2 * chunk]), second = unpack_fp8<f16>(words[2 * chunk + 1]);
        multiply<f16>(out[both * 4 + chunk * 2], w[0], w[1], w[2], w[3], first.even, second.even);
        multiply<f16>(out[both * 4 + chunk * 2 + 1], w[0], w[1], w[2], w[3], first.odd, second.odd);
      }
    }
  }
};

template <class C, int D>
__device__ __forceinline__ void attend_piece(const DecodeArgs& args, const uint32_t (&q)[D / 16][4], const char* stage, int piece, int context,
                                             State<D>& s) {
  using Element = typename Tiles<C, D>::Element;
  const int t = threadIdx.x % 4;
  float scores[2][4] = {};
  Tiles<C, D>::dot(scores, q, stage);
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
  const uint32_t weights[4] = {pair_of<Element>(scores[0][0], scores[0][1]), pair_of<Element>(scores[0][2], scores[0][3]),
                               pair_of<Element>(scores[1][0], scores[1][1]), pair_of<Element>(scores[1][2], scores[1][3])};
  Tiles<C, D>::blend(s.out, weights, stage + Layout<C, D>::piece_bytes);
}

// A pair of one head's query values, as the tiles take them.
template <class T, class C, int D>
__device__ __forceinline__ uint32_t query_pair(const T* query, int step, int i, int t) {
  using Q = Tiles<C, D>;
  if constexpr (sizeof(C) == sizeof(T)) return *reinterpret_cast<const uint32_t*>(query + Q::query_dim(step, i, t, 0));
  return pair_of<typename Q::Element>(to_float(query[Q::query_dim(step, i, t, 0)]), to_float(query[Q::query_dim(step, i, t, 1)]));
}

template <class T, class C, int D>
__global__ void __launch_bounds__(kWarps * 32) decode_kernel(DecodeArgs args) {
  using L = Layout<C, D>;
  extern __shared__ __align__(128) char shared[];
  const int row = blockIdx.y, group = args.q_heads / args.cache.heads, tiles = (group + kGroup - 1) / kGroup;
  const int kv_head = blockIdx.x / tiles, first_head = kv_head * group + blockIdx.x % tiles * kGroup;
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
    if (ahead < span.last) fetch_piece<C, D>(args, table, kv_head, ahead, context, own + i * L::stage_bytes);
    commit();
  }
  uint32_t q[D / 16][4];
  const T* query = static_cast<const T*>(args.q) + row * args.q_stride + static_cast<int64_t>(first_head) * D;
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = g + i % 2 * 8;
      q[step][i] = head < num_heads ? query_pair<T, C, D>(query + head * D, step, i, t) : 0u;
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
    if (ahead < span.last) fetch_piece<C, D>(args, table, kv_head, ahead, context, own + next * L::stage_bytes);
    commit();
    wait_for_copies<kStages - 1>();
    __syncwarp();
    attend_piece<C, D>(args, q, own + stage * L::stage_bytes, piece, context, s);
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
    for (int i = 0; i < 4; ++i) results[(warp * kGroup + g + i / 2 * 8) * (D + 2) + Tiles<C, D>::out_dim(n, t * 2 + i % 2)] = s.out[n][i];
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
      static_cast<T*>(args.out)[row * args.out_stride + static_cast<int64_t>(q_head) * D + dim] = from_float<T>(sum > 0.0f ? total / sum * args.cache.v_scale : 0.0f);
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
  static_cast<T*>(args.out)[row * args.out_stride + static_cast<int64_t>(head) * D + dim] = from_float<T>(sum > 0.0f ? total / sum * args.cache.v_scale : 0.0f);
}

template <class T, class C, int D>
void run(DecodeArgs args, Stream stream) {
  constexpr int shared = Layout<C, D>::bytes;
  static const cudaError_t allowed = cudaFuncSetAttribute(decode_kernel<T, C, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  check(allowed, "shared memory of decode_attention");
  args.scale *= args.cache.k_scale / Tiles<C, D>::kUnit;
  args.cache.v_scale /= Tiles<C, D>::kUnit;
  const int tiles = (args.q_heads / args.cache.heads + kGroup - 1) / kGroup;
  launch(decode_kernel<T, C, D>, dim3(args.cache.heads * tiles, args.rows, args.splits), dim3(kWarps * 32), shared, stream, args);
  if (args.splits > 1) launch(fold_kernel<T>, dim3(args.rows, args.q_heads), dim3(D), 0, stream, args);
}

}  // namespace

int64_t decode_scratch_floats(int rows, int q_heads, int dim, int splits) {
  return splits > 1 ? static_cast<int64_t>(rows) * q_heads * splits * (dim + 2) : 0;
}

void decode_attention(const DecodeArgs& args, Stream stream) {
  if (args.rows < 1) return;
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    const bool is_fp8 = args.cache.type == Type::fp8;
    if (!is_fp8 && args.cache.type != args.type) throw std::invalid_argument("decode_attention takes a cache of the queries' type, or fp8");
    switch (args.cache.dim) {
      case 64: return is_fp8 ? run<T, fp8, 64>(args, stream) : run<T, T, 64>(args, stream);
      case 96: return is_fp8 ? run<T, fp8, 96>(args, stream) : run<T, T, 96>(args, stream);
      case 128: return is_fp8 ? run<T, fp8, 128>(args, stream) : run<T, T, 128>(args, stream);
      case 256: return is_fp8 ? run<T, fp8, 256>(args, stream) : run<T, T, 256>(args, stream);
      case 80:
        if (!is_fp8) return run<T, T, 80>(args, stream);
        break;
      default: break;
    }
    throw std::invalid_argument("decode_attention has head dims 64, 96, 128, 256, and 80 without fp8; got " + std::to_string(args.cache.dim));
  });
}

}  // namespace trireme::cuda
