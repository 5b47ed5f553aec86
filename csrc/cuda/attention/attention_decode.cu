// Attention of one query per sequence over the paged cache, bound by reading keys and values once.
//
// Tokens are the 16 rows of tensor-core tiles, the query heads of one KV head their 8 columns: scores [tokens, heads] = K Q^T,
// outputs [dims, heads] = V^T P. The four warps of a CTA alternate over pieces of a context, each with its own online softmax
// (Milakov and Gimelshein 2018), while cp.async prefetches the next pieces; their results are merged at the end in order. If many
// short contexts fill the GPU, a CTA takes adjacent heads of a sequence, one or two warps each. Long contexts are split into
// `splits` parts that run in parallel and are merged within a cluster, or by a second kernel (Flash-Decoding, Dao et al. 2023).
// The heads of a sequence run next to each other, since their pieces are adjacent in memory.
#include <cooperative_groups.h>

#include "cuda/async_copy.cuh"
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kStages = 3;
constexpr int kHeads = 8;     // query heads per tile
constexpr int kRun = 16;      // tokens that are contiguous if the block size is a power of two of at least this
constexpr int kShort = 512;   // tokens; up to here one warp per head may suffice
constexpr int kCluster = 8;   // maximum CTAs per cluster
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kSlack = 8.0f;  // how far, in powers of two, scores may exceed the reference maximum before a rescale

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// An 8 x 8 matrix of 16-bit values held by a warp, two per lane.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ float power_of_2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

template <class E>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t rounded_pair<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t rounded_pair<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Launch parameters chosen beside the arguments.
struct Plan {
  int log_joint;   // a CTA takes 1 << log_joint adjacent heads of a sequence with a short context
  int run_shift;   // log2 of the cache's block size if blocks hold whole runs; else negative
  bool is_cluster; // the parts of a context form a cluster
};

// Lines of 16-byte chunks in shared memory, swizzled so that eight lines of one column are in different banks.
template <class C, int D, int Tokens>
struct Layout {
  static constexpr int per_chunk = 16 / sizeof(C);  // values
  static constexpr int chunks = D / per_chunk;
  static constexpr int row_bytes = (chunks + 7) / 8 * 8 * 16;
  static constexpr int piece_bytes = Tokens * row_bytes;
  static constexpr int stage_bytes = 2 * piece_bytes;  // keys, values
  static constexpr int warp_bytes = kStages * stage_bytes;
  static constexpr int bytes = kWarps * warp_bytes;
  static constexpr int copies = kRun * chunks / 32;  // per lane for one run of keys
  static_assert(kRun * chunks % 32 == 0, "lanes share the chunks of a run evenly");

  // Position of the lane's i-th chunk in a run.
  static __device__ __forceinline__ uint32_t place(int i) {
    const int index = threadIdx.x % 32 + 32 * i, token = index / chunks, chunk = index % chunks;
    return token * row_bytes + (chunk ^ (token & 7)) * 16;
  }
  // Position of the line a lane passes to ldmatrix: tokens 0-7 and 8-15 of one chunk, then of the next. The chunk is xored in.
  static __device__ __forceinline__ uint32_t lane_place() {
    const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    return (matrix % 2 * 8 + row) * row_bytes + (matrix / 2 ^ row) * 16;
  }
};

// Partial result of one head: sums of weights and of weighted values, relative to 2^top. In memory: D totals, top, sum, two unused.
template <int D>
constexpr int kRecord = D + 4;

struct Part {
  float top = -INFINITY, sum = 0.0f, total[4] = {};
};

// Merges four dims of `count` records, in order.
template <int D, int Unroll, class At>
__device__ __forceinline__ Part fold(int count, int dim, At at) {
  Part part;
#pragma unroll Unroll
  for (int i = 0; i < count; ++i) part.top = fmaxf(part.top, at(i)[D]);
#pragma unroll Unroll
  for (int i = 0; i < count; ++i) {
    const float* record = at(i);
    const float factor = record[D] == -INFINITY ? 0.0f : power_of_2(record[D] - part.top);
    const float4 values = *reinterpret_cast<const float4*>(record + dim);
    part.sum += record[D + 1] * factor;
    part.total[0] += values.x * factor;
    part.total[1] += values.y * factor;
    part.total[2] += values.z * factor;
    part.total[3] += values.w * factor;
  }
  return part;
}

template <int D>
__device__ __forceinline__ void store_record(float* record, int dim, const Part& part) {
  *reinterpret_cast<float4*>(record + dim) = make_float4(part.total[0], part.total[1], part.total[2], part.total[3]);
  if (dim == 0) record[D] = part.top, record[D + 1] = part.sum;
}

// Stores four values of a sequence's output; returns their amax.
template <class T, int D>
__device__ __forceinline__ float store_output(const DecodeArgs& args, int row, int q_head, int dim, Part part) {
  if (args.sinks != nullptr && part.sum > 0.0f) part.sum += power_of_2(args.sinks[q_head] * kLog2e - part.top);
  T* out = static_cast<T*>(args.out) + row * args.out_stride + static_cast<int64_t>(q_head) * D + dim;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = from_float<T>(part.sum > 0.0f ? part.total[i] / part.sum * args.cache.v_scale : 0.0f);
    largest = larger(largest, fabsf(to_float(out[i])));
  }
  return largest;
}

struct Span {
  int first, last;  // pieces
};

template <int Tokens>
__device__ __forceinline__ Span pieces_of(int context, int window, int splits, int split) {
  const int begin = window > 0 && context > window ? (context - window) / Tokens : 0, end = (context + Tokens - 1) / Tokens;
  const int each = (end - begin + splits - 1) / splits;
  const int first = min(begin + split * each, end);
  return {first, min(first + each, end)};
}

// Copies pieces of one KV head of one sequence. `find` looks up the blocks of a piece, ahead of `fetch`.
template <class C, int D, int Tokens>
struct Reader {
  using L = Layout<C, D, Tokens>;
  static constexpr int runs = Tokens / kRun, token_bytes = D * sizeof(C);
  const int32_t* table;
  const char *keys, *values;  // of the head in block 0
  int64_t block_bytes;
  int context, block_size, run_shift;
  int32_t blocks[runs];

  __device__ __forceinline__ Reader(const DecodeArgs& args, const Plan& plan, int row, int kv_head, int context)
      : table(args.block_table + static_cast<int64_t>(row) * args.table_stride), context(context), block_size(args.cache.block_size),
        run_shift(plan.run_shift) {
    const int64_t head_bytes = static_cast<int64_t>(block_size) * token_bytes;
    block_bytes = head_bytes * args.cache.heads;
    keys = static_cast<const char*>(args.cache.k) + kv_head * head_bytes;
    values = static_cast<const char*>(args.cache.v) + kv_head * head_bytes;
  }

  __device__ __forceinline__ void find(int piece) {
    if (run_shift < 0) return;
#pragma unroll
    for (int r = 0; r < runs; ++r) blocks[r] = table[min(piece * Tokens + r * kRun, context - 1) >> run_shift];
  }

  template <bool IsWhole>
  __device__ __forceinline__ void fetch_runs(int piece, uint32_t stage) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < runs; ++r) {
      const int start = piece * Tokens + r * kRun;
      const int64_t place = blocks[r] * block_bytes + (start & (block_size - 1)) * token_bytes + lane * 16;
#pragma unroll
      for (int i = 0; i < L::copies; ++i) {
        const bool is_valid = start + (lane + 32 * i) / L::chunks < context;
        const uint32_t to = stage + r * kRun * L::row_bytes + L::place(i);
        copy_async<IsWhole>(to, keys + place + 512 * i, is_valid);
        copy_async<IsWhole>(to + L::piece_bytes, values + place + 512 * i, is_valid);
      }
    }
  }

  // Token by token, for block sizes that do not hold whole runs.
  __device__ __forceinline__ void fetch_tokens(int piece, uint32_t stage) const {
#pragma unroll 1
    for (int i = 0; i < runs * L::copies; ++i) {
      const int index = threadIdx.x % 32 + 32 * i, token = index / L::chunks, chunk = index % L::chunks, position = piece * Tokens + token;
      const int near = min(position, context - 1), block = near / block_size;
      const int64_t place = table[block] * block_bytes + (near - block * block_size) * token_bytes + chunk * 16;
      const uint32_t to = stage + token * L::row_bytes + (chunk ^ (token & 7)) * 16;
      copy_async<false>(to, keys + place, position < context);
      copy_async<false>(to + L::piece_bytes, values + place, position < context);
    }
  }

  __device__ __forceinline__ void fetch(int piece, uint32_t stage) const {
    if (run_shift < 0) {
      fetch_tokens(piece, stage);
    } else if ((piece + 1) * Tokens <= context) {
      fetch_runs<true>(piece, stage);
    } else {
      fetch_runs<false>(piece, stage);
    }
  }
};

// Converts a piece of the cache to tensor-core fragments of `Element`, unit() times the stored values: a[0..3] of a k-step of 16
// dims of keys, or of a tile of 16 dims of values. Queries use the same order of dims per step; out_dim gives that of outputs.
template <class C, int D, int Tokens>
struct Tiles {
  using Element = C;
  using L = Layout<C, D, Tokens>;
  static constexpr int steps = 1;  // per ldmatrix
  static constexpr bool has_neighbours = true;  // the two dims of a query pair are adjacent

  static __device__ __forceinline__ float unit() { return 1.0f; }
  static __device__ __forceinline__ int query_dim(int step, int i, int t, int which) { return step * 16 + i * 8 + t * 2 + which; }
  static __device__ __forceinline__ int out_dim(int n, int g, int half) { return n * 16 + half * 8 + g; }
  static __device__ __forceinline__ void keys(uint32_t (&a)[1][4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = words[i];
  }
  static __device__ __forceinline__ void values(uint32_t (&a)[1][4], const uint32_t (&words)[4]) {
    a[0][0] = words[0], a[0][1] = words[2], a[0][2] = words[1], a[0][3] = words[3];
  }
};

// float8: a 16-byte chunk holds the 16 dims of a k-step, four per thread. For values, a transposed word has two adjacent dims of
// two tokens, so even and odd dims become the halves of a tile.
template <int D, int Tokens>
struct Tiles<fp8, D, Tokens> {
  using Element = f16;
  using L = Layout<fp8, D, Tokens>;
  static constexpr int steps = 2;
  static_assert(D % 32 == 0, "chunks come in pairs");

#if __CUDA_ARCH__ >= 890
  static constexpr bool converts = true;  // in hardware
#else
  static constexpr bool converts = false;
#endif
  static constexpr bool has_neighbours = converts;

  static __device__ __forceinline__ float unit() { return converts ? 1.0f : kFp8Unit<f16>; }
  static __device__ __forceinline__ int query_dim(int step, int i, int t, int which) {
    return step * 16 + t * 4 + (converts ? i * 2 + which : i + which * 2);
  }
  static __device__ __forceinline__ int out_dim(int n, int g, int half) { return n * 16 + g * 2 + half; }

  static __device__ __forceinline__ void convert(uint32_t& low, uint32_t& high, uint32_t bytes) {
#if __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(bytes));
#endif
  }
  static __device__ __forceinline__ void split(uint32_t& first, uint32_t& second, uint32_t bytes) {
    const Fp8Pairs pairs = unpack_fp8<f16>(bytes);
    first = pairs.even, second = pairs.odd;
  }
  static __device__ __forceinline__ void keys(uint32_t (&a)[2][4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (converts) {
        convert(a[i / 2][i % 2], a[i / 2][i % 2 + 2], words[i]);
      } else {
        split(a[i / 2][i % 2], a[i / 2][i % 2 + 2], words[i]);
      }
    }
  }
  static __device__ __forceinline__ void values(uint32_t (&a)[2][4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t& even = a[i / 2][i % 2 * 2];
      uint32_t& odd = a[i / 2][i % 2 * 2 + 1];
      if constexpr (converts) {
        convert(even, odd, __byte_perm(words[i], 0, 0x3120));
      } else {
        split(even, odd, words[i]);
      }
    }
  }
};

// A thread's share of the heads' outputs and softmax: heads 2t and 2t + 1 of each tile.
template <int D, int NT>
struct State {
  float out[NT][D / 16][4];
  float top[NT][2], sum[NT][2];
};

template <int NT>
using Tops = float[NT][2];

// Rescales weights to the running maximum of the scores.
template <int D, int NT>
__device__ __forceinline__ void raise(State<D, NT>& s, Tops<NT>& top) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float highest = fmaxf(s.top[nt][j], top[nt][j]);
#pragma unroll
      for (int lane = 4; lane < 32; lane *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, lane));
      const float keep = highest == -INFINITY ? 1.0f : power_of_2(s.top[nt][j] - highest);
      s.top[nt][j] = highest;
      s.sum[nt][j] *= keep;
#pragma unroll
      for (int n = 0; n < D / 16; ++n) s.out[nt][n][j] *= keep, s.out[nt][n][j + 2] *= keep;
    }
  }
}

// Converts dot products to scores in powers of two.
struct Scores {
  float factor, cap;  // cap > 0: cap * tanh(factor * product), else factor * product
  int context, first_seen;
};

template <class C, int D, int NT, int Tokens>
__device__ __forceinline__ void attend_piece(const Scores& how, const uint32_t (&q)[NT][D / 16][2], uint32_t stage, int piece, State<D, NT>& s) {
  using F = Tiles<C, D, Tokens>;
  using L = Layout<C, D, Tokens>;
  using Element = typename F::Element;
  constexpr int tiles = Tokens / 16, loads = D / 16 / F::steps;
  const uint32_t lane_at = stage + L::lane_place();
  float scores[tiles][NT][4] = {};
#pragma unroll
  for (int i = 0; i < loads; ++i) {
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
      uint32_t words[4], a[F::steps][4];
      load_matrices(words, (lane_at ^ (i * 32)) + m * 16 * L::row_bytes);
      F::keys(a, words);
#pragma unroll
      for (int k = 0; k < F::steps; ++k) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const uint32_t(&b)[2] = q[nt][i * F::steps + k];
          multiply<Element>(scores[m][nt], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
        }
      }
    }
  }
  const int start = piece * Tokens, g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][nt][i] *= how.factor;
    }
  }
  if (how.cap > 0.0f) {
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][nt][i] = how.cap * tanhf(scores[m][nt][i]);
      }
    }
  }
  if (start + Tokens > how.context || start < how.first_seen) {
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = start + m * 16 + i / 2 * 8 + g;
        const bool is_seen = position < how.context && position >= how.first_seen;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) scores[m][nt][i] = is_seen ? scores[m][nt][i] : -INFINITY;
      }
    }
  }
  Tops<NT> top;
  bool is_higher = false;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      top[nt][j] = fmaxf(scores[0][nt][j], scores[0][nt][j + 2]);
#pragma unroll
      for (int m = 1; m < tiles; ++m) top[nt][j] = fmaxf(top[nt][j], fmaxf(scores[m][nt][j], scores[m][nt][j + 2]));
      is_higher |= top[nt][j] > s.top[nt][j] + kSlack;
    }
  }
  if (__any_sync(0xffffffffu, is_higher)) raise<D, NT>(s, top);
  uint32_t weights[tiles][NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float base = s.top[nt][j] == -INFINITY ? 0.0f : s.top[nt][j];
#pragma unroll
      for (int m = 0; m < tiles; ++m) {
        float& first = scores[m][nt][j];
        float& second = scores[m][nt][j + 2];
        first = power_of_2(first - base), second = power_of_2(second - base);
        s.sum[nt][j] += first + second;
      }
    }
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
      weights[m][nt][0] = transposed(rounded_pair<Element>(scores[m][nt][0], scores[m][nt][1]));
      weights[m][nt][1] = transposed(rounded_pair<Element>(scores[m][nt][2], scores[m][nt][3]));
    }
  }
#pragma unroll
  for (int i = 0; i < loads; ++i) {
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
      uint32_t words[4], a[F::steps][4];
      load_transposed(words, (lane_at ^ (i * 32)) + L::piece_bytes + m * 16 * L::row_bytes);
      F::values(a, words);
#pragma unroll
      for (int k = 0; k < F::steps; ++k) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          multiply<Element>(s.out[nt][i * F::steps + k], a[k][0], a[k][1], a[k][2], a[k][3], weights[m][nt][0], weights[m][nt][1]);
        }
      }
    }
  }
}

template <class T>
struct alignas(2 * sizeof(T)) Neighbours {
  T v[2];
};

// A pair of one head's query values, in the tiles' order of dims.
template <class F, class T, class C>
__device__ __forceinline__ uint32_t query_pair(const T* query, int step, int i, int t) {
  if constexpr (sizeof(C) == sizeof(T)) return *reinterpret_cast<const uint32_t*>(query + F::query_dim(step, i, t, 0));
  if constexpr (F::has_neighbours) {
    const Neighbours<T> pair = *reinterpret_cast<const Neighbours<T>*>(query + F::query_dim(step, i, t, 0));
    return rounded_pair<typename F::Element>(to_float(pair.v[0]), to_float(pair.v[1]));
  }
  return rounded_pair<typename F::Element>(to_float(query[F::query_dim(step, i, t, 0)]), to_float(query[F::query_dim(step, i, t, 1)]));
}

template <class T, class C, int D, int NT, int Tokens>
__global__ void __launch_bounds__(kWarps * 32) decode_kernel(DecodeArgs args, Plan plan) {
  using F = Tiles<C, D, Tokens>;
  using L = Layout<C, D, Tokens>;
  constexpr int most = NT * kHeads, record_floats = kRecord<D>;
  static_assert(2 * most * record_floats * 4 <= L::warp_bytes, "a warp's stages have room for its results and the block's");
  extern __shared__ __align__(1024) char shared[];
  const int row = blockIdx.y, split = blockIdx.z, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int context = args.context_len[row];
  const int log_joint = context <= kShort ? plan.log_joint : 0, ways = kWarps >> log_joint;
  if (blockIdx.x & ((1 << log_joint) - 1)) return;  // another CTA takes this head
  const int turn = warp & (ways - 1), unit = blockIdx.x + (warp >> (2 - log_joint));
  const int group = args.q_heads / args.cache.heads, parts = (group + most - 1) / most, kv_head = unit / parts;
  const int first_head = kv_head * group + unit % parts * most, num_heads = min(most, (kv_head + 1) * group - first_head);

  const Span span = context > 0 ? pieces_of<Tokens>(context, args.window, args.splits, split) : Span{0, 0};
  Reader<C, D, Tokens> reader(args, plan, row, kv_head, context);
  char* own = shared + warp * L::warp_bytes;
  const uint32_t stages = shared_address(own);
  // Only the last piece contains what the previous kernel writes, the newest token.
  const int num_early = (context - 1) / Tokens;
#pragma unroll 1
  for (int i = 0; i < 2 * (kStages - 1); ++i) {
    const bool is_late = i >= kStages - 1;
    const int to = is_late ? i - (kStages - 1) : i, piece = span.first + turn + to * ways;
    if (i == kStages - 1) {
      pdl_wait();
      pdl_launch_dependents();
    }
    if (piece < span.last && (piece >= num_early) == is_late) {
      reader.find(piece);
      reader.fetch(piece, stages + to * L::stage_bytes);
    }
    if (is_late) commit_copies();  // the first group contains everything fetched early
  }
  int ahead = span.first + turn + (kStages - 1) * ways;
  if (ahead < span.last) reader.find(ahead);

  uint32_t q[NT][D / 16][2];
  const T* query = static_cast<const T*>(args.q) + row * args.q_stride + static_cast<int64_t>(first_head) * D;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const int head = nt * kHeads + g;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) q[nt][step][i] = head < num_heads ? query_pair<F, T, C>(query + head * D, step, i, t) : 0u;
    }
  }
  State<D, NT> s;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s.out[nt][n][i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) s.top[nt][j] = -INFINITY, s.sum[nt][j] = 0.0f;
  }
  const float product = args.scale * args.cache.k_scale / F::unit();
  const bool is_capped = args.softcap > 0.0f;
  const Scores how{is_capped ? product / args.softcap : product * kLog2e, is_capped ? args.softcap * kLog2e : 0.0f, context,
                   args.window > 0 ? context - args.window : 0};
  int stage = 0;
  for (int piece = span.first + turn; piece < span.last; piece += ways) {
    const int next = stage == 0 ? kStages - 1 : stage - 1;
    __syncwarp();  // all lanes are done with the stage that is overwritten now
    if (ahead < span.last) {
      reader.fetch(ahead, stages + next * L::stage_bytes);
      ahead += ways;
      if (ahead < span.last) reader.find(ahead);
    }
    commit_copies();
    wait_for_copies<kStages - 1>();
    __syncwarp();
    attend_piece<C, D, NT, Tokens>(how, q, stages + stage * L::stage_bytes, piece, s);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_for_copies<0>();
  __syncwarp();  // the stages are reused for results, [heads][kRecord]
  float* results = reinterpret_cast<float*>(own);
  const float unit_of = 1.0f / F::unit();
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = s.sum[nt][j];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      const int head = nt * kHeads + t * 2 + j;
      if (head >= num_heads) continue;
      float* record = results + head * record_floats;
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) record[F::out_dim(n, g, half)] = s.out[nt][n][j + half * 2] * unit_of;
      }
      if (g == 0) record[D] = s.top[nt][j], record[D + 1] = sum;
    }
  }
  __syncthreads();
  const int items = num_heads * (D / 4);
  float largest = 0.0f;
  const char* first_of_unit = shared + (warp - turn) * L::warp_bytes;
  float* block_result = reinterpret_cast<float*>(shared + L::bytes) - most * record_floats;  // after the last warp's
  for (int i = turn * 32 + lane; i < items; i += ways * 32) {
    const int head = i / (D / 4), dim = i % (D / 4) * 4, q_head = first_head + head;
    const Part part = fold<D, kWarps>(ways, dim, [&](int w) {
      return reinterpret_cast<const float*>(first_of_unit + w * L::warp_bytes) + head * record_floats;
    });
    if (args.splits == 1) {
      largest = larger(largest, store_output<T, D>(args, row, q_head, dim, part));
    } else if (plan.is_cluster) {
      store_record<D>(block_result + head * record_floats, dim, part);
    } else {
      store_record<D>(args.partial + ((static_cast<int64_t>(row) * args.q_heads + q_head) * args.splits + split) * record_floats, dim, part);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (plan.is_cluster) {
    const auto cluster = cooperative_groups::this_cluster();
    cluster.sync();
    for (int i = threadIdx.x * args.splits + split; i < items; i += kWarps * 32 * args.splits) {
      const int head = i / (D / 4), dim = i % (D / 4) * 4;
      const Part part = fold<D, kCluster>(args.splits, dim, [&](int rank) {
        return static_cast<const float*>(cluster.map_shared_rank(block_result + head * record_floats, rank));
      });
      largest = larger(largest, store_output<T, D>(args, row, first_head + head, dim, part));
    }
    cluster.sync();  // the other CTAs have read our records
  }
#endif
  if (args.largest == nullptr || (args.splits > 1 && !plan.is_cluster)) return;
  largest = warp_max(largest);
  if (lane == 0) note_largest(args.largest + row, largest);
}

template <class T, int D>
__global__ void fold_kernel(DecodeArgs args) {
  const int row = blockIdx.x, head = blockIdx.y;
  pdl_wait();
  pdl_launch_dependents();
  const float* records = args.partial + (static_cast<int64_t>(row) * args.q_heads + head) * args.splits * kRecord<D>;
  const int dim = threadIdx.x * 4;
  const float largest = store_output<T, D>(args, row, head, dim, fold<D, 16>(args.splits, dim, [&](int i) { return records + i * kRecord<D>; }));
  if (args.largest != nullptr) note_largest(args.largest + row, largest);
}

constexpr int kManyBlocks = 1024;  // of four warps; from here on a GPU has enough CTAs with fewer warps per head

template <class T, class C, int D, int NT, int Tokens>
void run_tiles(const DecodeArgs& args, Stream stream) {
  constexpr int shared = Layout<C, D, Tokens>::bytes;
  constexpr auto kernel = decode_kernel<T, C, D, NT, Tokens>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  check(allowed, "shared memory of decode_attention");
  const int group = args.q_heads / args.cache.heads, units = args.cache.heads * ((group + NT * kHeads - 1) / (NT * kHeads));
  Plan plan{0, -1, args.splits > 1 && args.splits <= kCluster && current_card().has_clusters()};
  if (args.splits == 1) {
    while (plan.log_joint < 2 && units % (2 << plan.log_joint) == 0 && args.rows * units >> plan.log_joint >= kManyBlocks) ++plan.log_joint;
  }
  for (int shift = 0; shift < 31; ++shift) {
    if (args.cache.block_size == 1 << shift && args.cache.block_size >= kRun) plan.run_shift = shift;
  }
  const dim3 grid(units, args.rows, args.splits), cluster(1, 1, plan.is_cluster ? args.splits : 1);
  launch_clusters(kernel, grid, cluster, dim3(kWarps * 32), shared, stream, args, plan);
  if (args.splits > 1 && !plan.is_cluster) launch(fold_kernel<T, D>, dim3(args.rows, args.q_heads), dim3(D / 4), 0, stream, args);
}

template <class T, class C, int D>
void run(const DecodeArgs& args, Stream stream) {
  constexpr int tokens = sizeof(C) == 1 ? 32 : 16;
  if (args.q_heads / args.cache.heads <= kHeads) return run_tiles<T, C, D, 1, tokens>(args, stream);
  run_tiles<T, C, D, 2, tokens>(args, stream);
}

}  // namespace

int64_t decode_scratch_floats(int rows, int q_heads, int dim, int splits) {
  return splits > 1 ? static_cast<int64_t>(rows) * q_heads * splits * (dim + 4) : 0;
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
