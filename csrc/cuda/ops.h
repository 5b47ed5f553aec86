// The CUDA kernels as plain functions: raw device addresses, sizes in elements, a stream. No torch, no CUDA header. Called by
// bind/cuda.cpp. All are asynchronous, take no memory, and can be captured in a graph. They throw std::runtime_error when a
// launch is refused and std::invalid_argument for shapes they do not have.
//
// Legend: T tokens, H hidden, Hq query heads, Hk KV heads, D head dim, R rows, N outputs, K inputs, M rows of x.
#pragma once

#include <cstdint>

namespace trireme::cuda {

using Stream = void*;

enum class Type { f32 = 0, f16 = 1, bf16 = 2, fp8 = 3, int8 = 4 };  // fp8: e4m3

// What a product of float8 leaves to its reader: values are meant times that of their row, and that of their column. Null: nothing.
struct Scales {
  const float* rows;     // [T]
  const float* columns;  // [width]
};

// ---- norms.cu

struct NormArgs {
  const void* x;        // [T, H]
  int64_t x_stride;
  Scales x_scales;
  void* residual;       // [T, H] or null: residual += x, and the norm is of the sum
  int64_t residual_stride;
  const void* weight;   // [H]
  void* out;            // [T, H]; may be x
  int64_t out_stride;
  int tokens, hidden;
  float eps;
  float weight_offset;  // 1 for families that store the weight less one
  Type type;            // of x, residual, weight, out
  float* scale;         // not null: out is `narrow` times one scale per token, written here (largest magnitude / 448 or 127)
  Type narrow;          // fp8 or int8
  const void* bias;     // [H] or null: added last; layer norms alone
  const float* largest; // of quantize_rows: the largest magnitude of each token, where it is known; or null
};
void rms_norm(const NormArgs& args, Stream stream);
// The same of what is left of x less its mean, plus the bias.
void layer_norm(const NormArgs& args, Stream stream);
// x [T, H] as narrow values and a scale per token, without a norm; of args only x, out, scale, sizes and types count.
void quantize_rows(const NormArgs& args, Stream stream);

// ---- rotary.cu: rotates q and k in place, writes rotated k, and v, into the cache

struct PagedCache {
  void* k;  // [blocks, Hk, block_size, D]
  void* v;
  Type type;
  float k_scale, v_scale;  // fp8: what is stored is value / scale
  int heads, dim, block_size;
};

struct RotaryArgs {
  void* q;              // [T, Hq, D], tokens q_stride apart
  void* k;              // [T, Hk, D]
  void* v;              // written only to apply scales
  int64_t q_stride, k_stride, v_stride;
  Type type;            // of q, k, v, norms
  const float* cos_sin; // [max_position, rotary]: rotary / 2 cosines, then sines
  int64_t cos_sin_stride;  // 0: all positions have the same
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]; negative: nothing is written to the cache
  const void* q_norm;   // [D] or null: RMS norm of each head before rotation
  const void* k_norm;
  Scales scales;        // of q, k and v side by side
  int tokens, q_heads, rotary;
  float eps;
  PagedCache cache;
};
void rotary_and_cache(const RotaryArgs& args, Stream stream);

// ---- activation.cu

enum class Gate { silu = 0, gelu_tanh = 1, gelu = 2, relu = 3 };
// out [T, F] = act(gate_up[:, :F]) * gate_up[:, F:]
struct GatedArgs {
  const void* gate_up;  // [T, 2 F]
  int64_t stride;
  Scales scales;
  void* out;            // [T, F]
  int64_t out_stride;
  int tokens, width;
  Gate gate;
  Type type;            // of gate_up and out
  float* largest;       // [T] or null: where a token of out has a larger magnitude than this, it becomes that
};
void gated_activation(const GatedArgs& args, Stream stream);
// out [T, F] = act(gate_up [T, F]), of networks without a gate; out may be gate_up.
void activation(const GatedArgs& args, Stream stream);

// ---- attention_decode.cu: one query per row over the paged cache

struct DecodeArgs {
  const void* q;  // [R, Hq, D]
  int64_t q_stride;
  void* out;      // [R, Hq, D]
  int64_t out_stride;
  Type type;      // of q and out: f16 or bf16
  const int32_t* block_table;  // [R, table_stride]
  int table_stride;
  const int32_t* context_len;  // [R], this token included; 0: the row is padding
  int rows, q_heads;
  float scale;
  int window;      // 0: none
  float softcap;   // 0: none
  const float* sinks;  // [Hq] or null
  PagedCache cache;
  int splits;         // parts of one context that run side by side
  float* partial;     // splits > 1: [R, Hq, splits, D + 4]
  float* largest;     // [R] or null: as of GatedArgs
  // The table, the lengths and all tokens but the newest are read before pdl_wait: between whoever writes them and this there
  // must be a kernel that waits for its inputs before it lets the next one start, or that has no leave to overlap.
};
void decode_attention(const DecodeArgs& args, Stream stream);
int64_t decode_scratch_floats(int rows, int q_heads, int dim, int splits);

// ---- skinny.cu, skinny_fp8.cu, skinny_q4k.cu: out [M, N] = x [M, K] * w [N, K]^T for few rows, at the speed of reading w

enum class Weight {
  dense = 0,  // of the type of x
  fp8 = 1,    // e4m3, times `scale`
  q4_k = 2,   // rows of GGUF's Q4_K super-blocks
};

struct SkinnyArgs {
  const void* x;  // [M, K], rows x_stride apart
  int64_t x_stride;
  const void* w;  // row-major, 16-byte aligned; K a multiple of 64, of 256 for q4_k
  void* out;
  int64_t out_stride;
  const void* bias;    // [N] or null
  const float* scale;  // of the outputs, scale_step apart (0: one for all); or null
  int scale_step;
  int m, n, k;  // m up to skinny_max_rows()
  Type type;    // f16 or bf16, of x, out and bias
  Weight weight;
  int ways;  // q4_k: warps that share the K of an output: 1, 2, 4 or 8; 0: chosen by the shape
};
void skinny_linear(const SkinnyArgs& args, Stream stream);
int skinny_max_rows();
// The values of `count` Q4_K super-blocks, 256 each, as f16 or bf16.
void expand_q4_k(const void* blocks, void* out, int64_t count, Type type, Stream stream);

// ---- skinny_fp8_hopper.cu: out [M, N] = x [M, K] (w [N, K] * scale)^T + bias, w of e4m3; each row of x keeps 8 bits of its values

struct Fp8Args {
  const void* x;  // of `type`, rows at multiples of 16 bytes
  int64_t x_stride;
  const void* w;       // row-major, 16-byte aligned; K a multiple of 128
  const float* scale;  // [N] or null
  const void* bias;    // [N] or null
  void* out;
  int64_t out_stride;
  int m, n, k;  // m up to fp8_linear_rows(k)
  Type type;    // f16 or bf16
};
void fp8_linear(const Fp8Args& args, Stream stream);
int fp8_linear_rows(int k);  // 0 on a card that is no Hopper

// ---- blocks.cu, block_dots*: the same for every type of blocks; w is rows of K / 256 super-blocks, as block_types.cuh has them

enum class Blocks { q4_k = 0, q5_k = 1, q6_k = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q5_0 = 6, q5_1 = 7, iq4_nl = 8 };

// Up to block_linear_rows, x rounded to int8 with a scale for each 32 values. `weight`, `ways` and `x_scale` of args do not count.
void block_linear(const SkinnyArgs& args, Blocks blocks, Stream stream);
int block_linear_rows(Blocks blocks, int n, int k);
void expand_blocks(const void* blocks, void* out, int64_t count, Blocks kind, Type type, Stream stream);
int block_bytes(Blocks blocks);  // of a super-block

// ---- embedding.cu

// out [T, H] = table[ids], rows outside [first, first + count) become zero (vocabulary-parallel ranks)
void gather_rows(const void* table, const int32_t* ids, void* out, int tokens, int hidden, int first, int count, float scale, Type type, Stream stream);
// Copies whole blocks of one layer: pairs [count][2] of (source, destination); no destination may be a source.
void copy_blocks(void* cache, const int32_t* pairs, int count, int64_t block_bytes, Stream stream);

// ---- sampling.cu

// What a row's rules ask of its tokens, beside the numbers in its job: so many words of 32 bits, one after the other.
//   touched [ceil(vocab / 32)]  bit i: token i has a mark
//   marks [vocab]               the bits below
//   listed [num_listed]         by rising token
//   words [num_words]           sequences that must not be completed
//   past [kMostWord - 1]        the row's last tokens, the newest at the end; -1: none
// A row that is drawn and has penalties or words gets the token counted here, and added to its past.
constexpr uint32_t kOutputs = 0x07ffffff;  // how often it was output
constexpr uint32_t kCompletes = 1u << 27;  // it would complete a word; found anew for each draw, and set at first for all that may
constexpr uint32_t kInPrompt = 1u << 28;   // set where that counts: for the penalty of repetition
constexpr uint32_t kBarred = 1u << 29;
constexpr uint32_t kAllowed = 1u << 30;
constexpr uint32_t kListed = 1u << 31;

struct Listed {
  int32_t token;
  float bias;  // added; -inf: the token ends the row and is barred up to the job's ends_from
};

constexpr int kMostWord = 8;
struct BadWord {
  int32_t tokens[kMostWord];  // at the end; -1 before them
};

// What is asked of one row; workers/sampling/native_sampler.py knows the meaning of each.
struct SampleJob {
  uint64_t seed;
  double temperature;
  double top_p;      // 1: off
  double min_depth;  // temperature * log(min_p); -inf: off
  void* record;      // of its rules; null: it has none, and of the rest up to the penalties nothing counts
  int32_t choice;
  int32_t top_k;     // 0: off
  int32_t is_greedy;
  int32_t only_allowed;  // tokens without that mark are barred
  int32_t num_listed;
  int32_t num_words;
  int32_t ends_from;     // position from which on the row may end
  float repetition_penalty;  // 1: off, and the next two at 0
  float frequency_penalty;
  float presence_penalty;
  int32_t unused;
  int32_t num_logprobs;  // 0: none; 1: the token's own; 1 + k: also those of the k likeliest
};

constexpr int kMostLogprobs = 21;

// Under the logits as the model gave them; empty places have id -1 and -inf.
struct Logprobs {
  int32_t rank;  // of the token; 1: none is likelier
  int32_t ids[kMostLogprobs];
  float values[kMostLogprobs];
};

struct SampleArgs {
  const void* logits;  // [rows, vocab], rows logits_stride apart
  int64_t logits_stride;
  Type type;
  int rows, vocab;
  const SampleJob* jobs;     // [slots]
  const int32_t* slots;      // [rows], the job of each row, negative: none is drawn; null: row i has job i
  const int32_t* positions;  // [rows], index that the new token will have
  int32_t* tokens;           // [rows]; -2: the logits are not finite, -3: the rules bar every token
  Logprobs* logprobs;        // [rows] or null; written where a token is drawn and its job asks for some
};
void sample_rows(const SampleArgs& args, Stream stream);

}  // namespace trireme::cuda
