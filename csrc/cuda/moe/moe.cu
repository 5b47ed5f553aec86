// Mixture of experts without host synchronization: top-k routing, sorting of pairs by expert into tiles, a grouped GEMM over tiles,
// and the weighted sums. Grids are sized for the worst case; CTAs beyond the last tile exit at once.
//
// A GEMM CTA has up to BM places of one expert and 128 outputs of its matrix (64 gates and their 64 ups), staged through shared
// memory in pieces of 64 k's. Every output is one sum over k in ascending order, for any tile size.
#include <climits>

#include "cuda/async_copy.cuh"
#include "cuda/moe/moe.h"
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {
namespace {

// ---- routing: one warp per token

constexpr int kRouteWarps = 8;
constexpr int kLaneExperts = kMostExperts / 32;

// Integers ordered like the floats; NaN above all.
__device__ __forceinline__ int order_key(float x) {
  if (isnan(x)) return INT_MAX;
  const int bits = __float_as_int(x + 0.0f);  // -0 is 0
  return bits ^ (bits >> 31 & 0x7fffffff);
}

template <class T>
__global__ void __launch_bounds__(kRouteWarps * 32) route_kernel(RouteArgs args) {
  pdl_launch_dependents();
  pdl_wait();
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token >= args.tokens) return;
  const T* logits = static_cast<const T*>(args.logits) + token * args.stride;
  int keys[kLaneExperts];
#pragma unroll
  for (int j = 0; j < kLaneExperts; ++j) {
    const int expert = j * 32 + lane;
    keys[j] = expert < args.experts ? order_key(to_float(logits[expert])) : INT_MIN;
  }
  int chosen = 0;
  float logit = 0.0f, first = 0.0f;
  for (int s = 0; s < args.top_k; ++s) {
    int best = INT_MIN, at = INT_MAX;
#pragma unroll
    for (int j = 0; j < kLaneExperts; ++j) {
      if (keys[j] > best) {
        best = keys[j];
        at = j * 32 + lane;
      }
    }
    const int top = __reduce_max_sync(0xffffffffu, best);
    const int expert = __reduce_min_sync(0xffffffffu, best == top ? at : INT_MAX);
#pragma unroll
    for (int j = 0; j < kLaneExperts; ++j) {
      if (expert == j * 32 + lane) keys[j] = INT_MIN;
    }
    const float value = to_float(logits[expert]);
    if (s == 0) first = value;
    if (lane == s) {
      chosen = expert;
      logit = value;
    }
  }
  const bool is_mine = lane < args.top_k;
  const float share = is_mine ? __expf(logit - first) : 0.0f;
  const float total = warp_sum(share);
  if (!is_mine) return;
  args.chosen[token * args.top_k + lane] = chosen;
  args.scores[token * args.top_k + lane] = share / total;
}

// ---- sorting pairs by expert: one CTA

constexpr int kSortThreads = 1024;

__global__ void __launch_bounds__(kSortThreads) sort_kernel(SortArgs args) {
  __shared__ int counts[kMostExperts];  // of pairs; later the next free place
  __shared__ int2 sums[kMostExperts];   // inclusive prefix sums of places and tiles by expert
  const int at = threadIdx.x;
  const bool is_expert = at < kMostExperts;
  if (is_expert) counts[at] = 0;
  pdl_launch_dependents();
  pdl_wait();
  __syncthreads();
  for (int pair = at; pair < args.pairs; pair += kSortThreads) atomicAdd(&counts[args.chosen[pair]], 1);
  __syncthreads();
  const int count = is_expert ? counts[at] : 0, tiles = (count + args.tile_rows - 1) / args.tile_rows;
  if (is_expert) sums[at] = make_int2(count, tiles);
  __syncthreads();
  for (int reach = 1; reach < kMostExperts; reach *= 2) {
    const int2 before = is_expert && at >= reach ? sums[at - reach] : make_int2(0, 0);
    __syncthreads();
    if (is_expert) sums[at] = make_int2(sums[at].x + before.x, sums[at].y + before.y);
    __syncthreads();
  }
  if (is_expert) {
    const int first = sums[at].x - count;
    int32_t* tile = args.tiles + 1 + 3 * (sums[at].y - tiles);
    for (int done = 0; done < count; done += args.tile_rows, tile += 3) {
      tile[0] = at;
      tile[1] = first + done;
      tile[2] = min(args.tile_rows, count - done);
    }
    counts[at] = first;
  }
  if (at == 0) args.tiles[0] = sums[kMostExperts - 1].y;
  __syncthreads();
  for (int pair = at; pair < args.pairs; pair += kSortThreads) args.sorted[atomicAdd(&counts[args.chosen[pair]], 1)] = pair;
}

// ---- grouped GEMMs

constexpr int kPiece = 64;     // k's of a stage
constexpr int kRowBytes = 128; // of a piece of a row
constexpr int kRows = 128;     // outputs per CTA

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Offset of 16 bytes of a row in a stage; adjacent rows start at different banks.
__device__ __forceinline__ uint32_t place_of(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }

// The comparisons propagate NaN.
__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if (limit <= 0.0f) return gate / (1.0f + __expf(-gate)) * up;
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.0f) * (gate / (1.0f + __expf(-alpha * gate)));
}

// WM x WN warps, each with 16 * MT places and 8 * NT outputs.
template <class T, int MT, int NT, int WM, int WN, int STAGES, bool kIsGated>
__global__ void __launch_bounds__(32 * WM * WN) expert_kernel(ExpertArgs args) {
  constexpr int kThreads = 32 * WM * WN, kPlaces = 16 * MT * WM, kStep = kThreads / 8;  // rows that all threads copy at a time
  constexpr int kMine = (kPlaces + kStep - 1) / kStep, kTheirs = kRows / kStep;
  constexpr int kStage = (kPlaces + kRows) * kRowBytes, kOutputs = kIsGated ? kRows / 2 : kRows;
  static_assert(8 * NT * WN == kRows && kPlaces % kStep == 0 && NT % 4 == 0);
  extern __shared__ __align__(128) unsigned char stages[];
  pdl_launch_dependents();
  pdl_wait();
  if (static_cast<int>(blockIdx.y) >= args.tiles[0]) return;
  const int32_t* tile = args.tiles + 1 + 3 * blockIdx.y;
  const int expert = tile[0], first = tile[1], count = tile[2];
  const int width = kIsGated ? args.n / 2 : args.n, output = blockIdx.x * kOutputs;

  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8;
  const T* x_rows[kMine];
  bool has_x[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int at = line + i * kStep;
    has_x[i] = at < count;
    const int place = first + (has_x[i] ? at : 0);
    const int64_t row = kIsGated ? args.sorted[place] / args.top_k : place;
    x_rows[i] = static_cast<const T*>(args.x) + row * args.x_stride + chunk * 8;
  }
  const T* w_rows[kTheirs];
  bool has_w[kTheirs];
#pragma unroll
  for (int i = 0; i < kTheirs; ++i) {
    const int at = line + i * kStep, column = output + at % kOutputs;
    has_w[i] = column < width;
    const int64_t row = static_cast<int64_t>(expert) * args.n + (has_w[i] ? at / kOutputs * width + column : 0);
    w_rows[i] = static_cast<const T*>(args.w) + row * args.k + chunk * 8;
  }
  const uint32_t base = shared_address(stages), spot = place_of(line, chunk);  // (8 divides kStep)
  const auto fetch = [&](int piece) {
    const uint32_t to = base + piece % STAGES * kStage + spot;
    const int at = piece * kPiece;
    const bool is_inside = at + chunk * 8 < args.k;
#pragma unroll
    for (int i = 0; i < kMine; ++i) copy_async<false>(to + i * kStep * kRowBytes, x_rows[i] + at, is_inside && has_x[i]);
#pragma unroll
    for (int i = 0; i < kTheirs; ++i) {
      copy_async<false>(to + (kPlaces + i * kStep) * kRowBytes, w_rows[i] + at, is_inside && has_w[i]);
    }
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp / WN, wn = warp % WN;
  // Matrix rows of pair p of a warp's NT tiles of 8: gates, then their ups.
  const auto row_of = [&](int p) {
    if constexpr (!kIsGated) return wn * 8 * NT + p * 16;
    constexpr int half = NT / 4;
    return p / half * kOutputs + wn * 4 * NT + p % half * 16;
  };
  float acc[MT][NT][4] = {};
  const int pieces = (args.k + kPiece - 1) / kPiece;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < pieces) fetch(i);
    commit_copies();
  }
  for (int piece = 0; piece < pieces; ++piece) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (piece + STAGES - 1 < pieces) fetch(piece + STAGES - 1);
    commit_copies();
    const uint32_t places = base + piece % STAGES * kStage, rows = places + kPlaces * kRowBytes;
#pragma unroll
    for (int k = 0; k < kPiece / 16; ++k) {
      uint32_t a[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) load_matrices(a[m], places + place_of((wm * MT + m) * 16 + lane % 16, k * 2 + lane / 16));
#pragma unroll
      for (int p = 0; p < NT / 2; ++p) {
        uint32_t b[4];
        load_matrices(b, rows + place_of(row_of(p) + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          multiply<T>(acc[m][2 * p], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          multiply<T>(acc[m][2 * p + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  const int g = lane / 4, t = lane % 4;
  const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + static_cast<int64_t>(expert) * args.n;
#pragma unroll
  for (int m = 0; m < MT; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = (wm * MT + m) * 16 + half * 8 + g;
      if (at >= count) continue;
      const int64_t row = kIsGated ? first + at : args.sorted[first + at];
      T* out = static_cast<T*>(args.out) + row * width;
#pragma unroll
      for (int n = 0; n < (kIsGated ? NT / 2 : NT); ++n) {
        const int column = output + row_of(n / 2) + n % 2 * 8 + t * 2;
        if (column >= width) continue;
        float low = acc[m][n][half * 2], high = acc[m][n][half * 2 + 1];
        if (bias != nullptr) {
          low += to_float(bias[column]);
          high += to_float(bias[column + 1]);
        }
        if constexpr (kIsGated) {
          float low_up = acc[m][NT / 2 + n][half * 2], high_up = acc[m][NT / 2 + n][half * 2 + 1];
          if (bias != nullptr) {
            low_up += to_float(bias[width + column]);
            high_up += to_float(bias[width + column + 1]);
          }
          low = gated(low, low_up, args.limit, args.alpha);
          high = gated(high, high_up, args.limit, args.alpha);
        }
        *reinterpret_cast<uint32_t*>(out + column) = pair_of<T>(low, high);
      }
    }
  }
}

template <class T, int MT, int NT, int WM, int WN, int STAGES, bool kIsGated>
void run_experts(const ExpertArgs& args, Stream stream) {
  constexpr int shared = STAGES * (16 * MT * WM + kRows) * kRowBytes, outputs = kIsGated ? kRows / 2 : kRows;
  const auto kernel = expert_kernel<T, MT, NT, WM, WN, STAGES, kIsGated>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory of experts");
  const int width = kIsGated ? args.n / 2 : args.n;
  launch(kernel, dim3((width + outputs - 1) / outputs, args.most_tiles), dim3(32 * WM * WN), shared, stream, args);
}

template <bool kIsGated>
void multiply_experts(const ExpertArgs& args, Stream stream) {
  if (args.most_tiles < 1) return;
  if (args.k % 8 != 0 || args.x_stride % 8 != 0 || args.n % (kIsGated ? 16 : 8) != 0) {
    throw std::invalid_argument("experts take inputs and outputs that 8 divides; got " + std::to_string(args.k) + " inputs, rows " +
                                std::to_string(args.x_stride) + " apart, " + std::to_string(args.n) + " outputs");
  }
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    switch (args.tile_rows) {
      case 16: return run_experts<T, 1, 4, 1, 4, 4, kIsGated>(args, stream);
      case 64: return run_experts<T, 2, 8, 2, 2, 3, kIsGated>(args, stream);
      case 128: return run_experts<T, 2, 8, 4, 2, 3, kIsGated>(args, stream);
      default: throw std::invalid_argument("tiles of experts have 16, 64 or 128 rows; got " + std::to_string(args.tile_rows));
    }
  });
}

// ---- weighted sums

template <class T>
__global__ void mix_kernel(MixArgs args, int first) {
  pdl_launch_dependents();
  pdl_wait();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * Pack<T>::size;
  if (at >= args.hidden) return;
  const int64_t token = first + blockIdx.y;
  float sums[Pack<T>::size] = {};
  for (int s = 0; s < args.top_k; ++s) {
    const int64_t pair = token * args.top_k + s;
    const Pack<T> part = load_pack(static_cast<const T*>(args.results) + pair * args.hidden + at);
    const float score = args.scores[pair];
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) sums[i] += score * to_float(part.v[i]);
  }
  Pack<T> result;
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) result.v[i] = from_float<T>(sums[i]);
  store_pack(static_cast<T*>(args.out) + token * args.out_stride + at, result);
}

void need_experts(const char* op, int experts) {
  if (experts >= 1 && experts <= kMostExperts) return;
  throw std::invalid_argument(std::string(op) + " takes up to " + std::to_string(kMostExperts) + " experts; got " + std::to_string(experts));
}

}  // namespace

void route_experts(const RouteArgs& args, Stream stream) {
  if (args.tokens < 1) return;
  need_experts("route_experts", args.experts);
  if (args.top_k < 1 || args.top_k > kMostChosen || args.top_k > args.experts) {
    throw std::invalid_argument("route_experts chooses up to " + std::to_string(kMostChosen) + " of a token's experts; got " +
                                std::to_string(args.top_k) + " of " + std::to_string(args.experts));
  }
  with_type(args.type, [&](auto zero) {
    launch(route_kernel<decltype(zero)>, dim3((args.tokens + kRouteWarps - 1) / kRouteWarps), dim3(kRouteWarps * 32), 0, stream, args);
  });
}

void sort_pairs(const SortArgs& args, Stream stream) {
  need_experts("sort_pairs", args.experts);
  launch(sort_kernel, dim3(1), dim3(kSortThreads), 0, stream, args);
}

void expert_gates(const ExpertArgs& args, Stream stream) { multiply_experts<true>(args, stream); }
void expert_outputs(const ExpertArgs& args, Stream stream) { multiply_experts<false>(args, stream); }

void mix_experts(const MixArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    need_packs<T>("mix_experts", args.hidden);
    constexpr int threads = 128;
    const int packs = args.hidden / Pack<T>::size;
    for (int first = 0; first < args.tokens; first += 65535) {  // limit of a grid's second dimension
      const int count = args.tokens - first < 65535 ? args.tokens - first : 65535;
      launch(mix_kernel<T>, dim3((packs + threads - 1) / threads, count), dim3(threads), 0, stream, args, first);
    }
  });
}

}  // namespace trireme::cuda
