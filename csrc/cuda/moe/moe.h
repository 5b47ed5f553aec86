// Mixture of experts: routing, and the experts' grouped GEMMs: moe.cu. No CUDA types.
//
// Legend: T tokens, E experts, S experts per token, P = T S pairs of a token and one of its experts, H hidden, F width of an expert.
// Pair t S + s is token t with its choice s; its place is its index once pairs are sorted by expert.
#pragma once

#include "cuda/ops.h"

namespace trireme::cuda {

constexpr int kMostExperts = 256;
constexpr int kMostChosen = 32;

struct RouteArgs {
  const void* logits;  // [T, E], tokens `stride` apart
  int64_t stride;
  int32_t* chosen;     // [T, S], most likely first, ties by lower number; NaN ranks above all
  float* scores;       // [T, S]: softmax over the chosen
  int tokens, experts, top_k;
  Type type;           // of logits
};
void route_experts(const RouteArgs& args, Stream stream);

// Pairs sorted by expert, and tiles of up to `tile_rows` places of one expert.
struct SortArgs {
  const int32_t* chosen;  // [P]
  int32_t* sorted;        // [P]: the pair at each place; the pairs of an expert are in unspecified order
  int32_t* tiles;         // [1 + 3 * most]: the number of tiles; then each tile's expert, first place, number of places
  int pairs, experts, tile_rows;
};
void sort_pairs(const SortArgs& args, Stream stream);

// One grouped GEMM: each pair with the matrix of its expert. Results depend neither on tile_rows nor on other pairs.
struct ExpertArgs {
  const void* x;        // rows x_stride apart, 8 divides it: [T, K] for expert_gates, [P, K] by place for expert_outputs
  int64_t x_stride;
  const void* w;        // [E, N, K]; 8 divides K and N
  const void* bias;     // [E, N] or null
  void* out;            // expert_gates: [P, N / 2] by place; expert_outputs: [P, N] by pair
  const int32_t* sorted;
  const int32_t* tiles;
  int most_tiles, tile_rows;  // tile_rows: 16, 64 or 128
  int top_k, n, k;
  float limit, alpha;   // of expert_gates; limit 0: SwiGLU, else GPT-OSS's clamped one
  Type type;            // f16 or bf16, of x, w, bias and out
};
// act(x w[:F]^T + bias[:F]) * (x w[F:]^T + bias[F:])
void expert_gates(const ExpertArgs& args, Stream stream);
void expert_outputs(const ExpertArgs& args, Stream stream);

// out [T, H] = sum over s of scores [T, S] * results [T, S, H], in float32 and rounded once.
struct MixArgs {
  const void* results;
  const float* scores;
  void* out;  // rows out_stride apart
  int64_t out_stride;
  int tokens, top_k, hidden;
  Type type;  // of results and out
};
void mix_experts(const MixArgs& args, Stream stream);

}  // namespace trireme::cuda
