// The CPU ops of a decoder layer: their arguments and the kernels that compute them. Called by bind/ops.cpp; the drivers
// (attention.cpp, elementwise.cpp) split the work into tasks for the kernels of one instruction set (ops_*.cpp).
// Pointers are to float32 unless noted, strides are in elements. Arguments are not checked here.
#pragma once

#include <cstdint>

namespace trireme {

// Largest head_dim; the bindings refuse more.
inline constexpr int kMaxHeadDim = 1024;

enum class KvType : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3, i16 = 4 };
inline bool is_integer(KvType type) { return type == KvType::i8 || type == KvType::i16; }

// Paged cache of one layer, contiguous. Floats: k [num_blocks, heads, dim, block_size], v [num_blocks, heads, block_size, dim].
// Integers (dim and block_size even): each head of a block has its elements, then one float scale ("unit") per token (zero for
// a token of zeros):
//
//     k   [dim / 2][block_size][2 dims], scales [block_size]      int16: 32767 is the L2 norm of the key, int8: 127 its amax
//     v   [block_size / 2][dim][2 tokens], scales [block_size]    32767 or 127 is the token's amax
struct KvView {
  void* k;
  void* v;
  KvType type;
  int heads;
  int dim;
  int block_size;
};

// Bytes of one head of one block of k or v.
inline int64_t kv_head_bytes(KvType type, int dim, int block_size) {
  const int64_t numbers = static_cast<int64_t>(dim) * block_size;
  switch (type) {
    case KvType::f32: return 4 * numbers;
    case KvType::f16:
    case KvType::bf16: return 2 * numbers;
    case KvType::i8: return numbers + 4 * block_size;
    case KvType::i16: return 2 * numbers + 4 * block_size;
  }
  return 0;
}

struct NormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;  // null: plain norm
  int64_t residual_stride;
  const float* weight;
  float* out;
  int64_t out_stride;
  int rows;
  int width;
  float eps;
};

struct RopeArgs {
  float* q;  // [tokens, q_heads, dim], rotated in place
  int64_t q_stride;
  const float* k;
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  int tokens;
  int q_heads;
  const float* cos_sin;  // [max_position, rot]: rot / 2 cosines, rot / 2 sines
  int rot;
  const int32_t* positions;
  const int32_t* slots;
  KvView kv;
  const float* q_norm;  // [dim] or null
  const float* k_norm;
  float eps;
};

struct AttentionArgs {
  const float* q;
  int64_t q_stride;
  int q_heads;
  KvView kv;
  const int32_t* query_start;  // [rows + 1]
  const int32_t* context_len;  // [rows]
  const int32_t* block_table;  // [rows, table_stride]
  int rows;
  int64_t table_stride;
  float scale;
  int window;  // 0: none
  float softcap;  // scores become softcap * tanh(score / softcap); 0: none
  float* out;  // [tokens, q_heads * dim]
  int64_t out_stride;
};

enum class Activation : int { silu = 0, gelu_tanh = 1 };

struct SwigluArgs {
  const float* gate_up;
  int64_t gate_up_stride;
  float* out;
  int64_t out_stride;
  int rows;
  int width;  // of the output
  Activation activation;
};

// True if the call is worth the pool, and releasing the GIL.
bool is_large(const NormArgs& a);
bool is_large(const RopeArgs& a);
bool is_large(const AttentionArgs& a);
bool is_large(const SwigluArgs& a);

void rms_norm(const NormArgs& a);
void rope_and_cache(const RopeArgs& a);
void paged_attention(const AttentionArgs& a);
void swiglu(const SwigluArgs& a);

// ---------------------------------------------------------------- between drivers and kernels

// Numerics of attention: online softmax over tiles of kTileTokens from position 0 on, restarted at every multiple of
// kPartTokens; the parts of one query are then merged in order. Neither depends on the other queries of the step.
inline constexpr int kTileTokens = 64;
inline constexpr int kPartTokens = 256;

// Some consecutive queries of one sequence against some KV heads: num_tokens tokens times the query heads of those KV heads.
struct AttentionTask {
  int row;
  int kv_head;      // the first
  int num_heads;    // several for few queries: blocks are then read sequentially, all heads of one after the other
  int first_token;  // index into q
  int num_tokens;
  int first_position;
  int part;         // -1: all parts, result to out; else that part only, result to `partial`
  float* partial;   // [num_heads * num_tokens * group, partial_stride]: max, sum, then dim values
};

struct OpsKernels {
  void (*norm_rows)(const NormArgs& a, int first, int last);
  void (*rope_tokens)(const RopeArgs& a, int first, int last);
  void (*swiglu_span)(const SwigluArgs& a, int row, int first, int last);
  void (*attend)(const AttentionArgs& a, const AttentionTask& task, float* scratch);
  // Merges num_parts partial results, part_stride floats apart, into out.
  void (*fold_parts)(const AttentionArgs& a, const AttentionTask& task, int num_parts, int64_t part_stride, float* scratch);
};

// Floats of scratch that attend and fold_parts need for tasks of at most num_queries (tokens times query heads).
int64_t attention_scratch_floats(int num_queries, int dim);
// Floats of one query's partial result.
inline int64_t partial_stride(int dim) { return (dim + 15) / 16 * 16 + 16; }

const OpsKernels& ops_kernels_portable();
const OpsKernels& ops_kernels_avx2();
const OpsKernels& ops_kernels_avx512();
// The kernels of the instruction set in use.
const OpsKernels& ops_kernels();

}  // namespace trireme
