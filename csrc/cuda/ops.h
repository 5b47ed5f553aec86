// The CUDA kernels as plain functions: raw device addresses, sizes in elements, a stream. No torch, no CUDA header. Called by
// bind/cuda.cpp. All are asynchronous, allocate nothing and can be captured in a graph. They throw std::runtime_error if a launch
// fails and std::invalid_argument for unsupported shapes.
//
// Legend: T tokens, H hidden, Hq query heads, Hk KV heads, D head dim, R sequences, N outputs, K inputs, M tokens of x.
#pragma once

#include <cstdint>

namespace trireme::cuda {

using Stream = void*;

enum class Type { f32 = 0, f16 = 1, bf16 = 2, fp8 = 3, int8 = 4 };  // fp8: e4m3

// Scales that a float8 GEMM leaves to its reader: values are to be multiplied by their token's and their column's. Null: none.
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
  float* scale;         // not null: out is quantized to `narrow` with one scale per token, written here (amax / 448 or 127)
  Type narrow;          // fp8 or int8
  const void* bias;     // [H] or null: added last; layer norms alone
  const float* largest; // of quantize_rows: the amax of each token, if known; or null
};
void rms_norm(const NormArgs& args, Stream stream);
// Layer norm: x minus its mean, normalized, plus the bias.
void layer_norm(const NormArgs& args, Stream stream);
// Quantizes x [T, H] with a scale per token, without a norm; of args only x, out, scale, sizes and types are used.
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
  int64_t cos_sin_stride;  // 0: all positions share one entry
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
  float* largest;       // [T] or null: per-token amax of out, merged by atomic max
};
void gated_activation(const GatedArgs& args, Stream stream);
// out [T, F] = act(gate_up [T, F]), for networks without a gate; out may be gate_up.
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
  const int32_t* context_len;  // [R], including this token; 0: padding
  int rows, q_heads;
  float scale;
  int window;      // 0: none
  float softcap;   // 0: none
  const float* sinks;  // [Hq] or null
  PagedCache cache;
  int splits;         // parts of one context that run in parallel
  float* partial;     // splits > 1: [R, Hq, splits, D + 4]
  float* largest;     // [R] or null: as in GatedArgs
  // The table, the lengths and all tokens except the newest are read before pdl_wait: between the kernel that writes them and this one
  // there must be a kernel that waits for its inputs before it lets the next one start, or that may not overlap.
};
void decode_attention(const DecodeArgs& args, Stream stream);
int64_t decode_scratch_floats(int rows, int q_heads, int dim, int splits);

// ---- skinny.cu, skinny_fp8.cu, skinny_q4k.cu: out [M, N] = x [M, K] * w [N, K]^T for small M, at the speed of reading w

enum class Weight {
  dense = 0,  // of x's type
  fp8 = 1,    // e4m3, times `scale`
  q4_k = 2,   // GGUF's Q4_K super-blocks
};

struct SkinnyArgs {
  const void* x;  // [M, K], rows x_stride apart
  int64_t x_stride;
  const void* w;  // row-major, 16-byte aligned; K a multiple of 64, of 256 for q4_k
  void* out;
  int64_t out_stride;
  const void* bias;    // [N] or null
  const float* scale;  // per output, scale_step apart (0: one for all); or null
  int scale_step;
  int m, n, k;  // m up to skinny_max_rows()
  Type type;    // f16 or bf16, of x, out and bias
  Weight weight;
  int ways;  // q4_k split-K: warps that share the K of an output, 1, 2, 4 or 8; 0: chosen by the shape
};
void skinny_linear(const SkinnyArgs& args, Stream stream);
int skinny_max_rows();
// Dequantizes `count` Q4_K super-blocks of 256 values to f16 or bf16.
void expand_q4_k(const void* blocks, void* out, int64_t count, Type type, Stream stream);

// ---- skinny_fp8_hopper.cu: out [M, N] = x [M, K] (w [N, K] * scale)^T + bias, w of e4m3; x is quantized to 8 significant bits

struct Fp8Args {
  const void* x;  // of `type`, tokens at multiples of 16 bytes
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
int fp8_linear_rows(int k);  // 0 unless the GPU is a Hopper

// ---- blocks.cu, block_dots*: the same for every quant block type; w is [N, K / 256] super-blocks, laid out as in block_types.cuh

enum class Blocks { q4_k = 0, q5_k = 1, q6_k = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q5_0 = 6, q5_1 = 7, iq4_nl = 8 };

// For M up to block_linear_rows, x quantized to int8 with a scale per 32 values. Ignores `weight`, `ways` and `x_scale` of args.
void block_linear(const SkinnyArgs& args, Blocks blocks, Stream stream);
int block_linear_rows(Blocks blocks, int n, int k);
void expand_blocks(const void* blocks, void* out, int64_t count, Blocks kind, Type type, Stream stream);
int block_bytes(Blocks blocks);  // of a super-block

// ---- embedding.cu

// out [T, H] = table[ids]; ids outside [first, first + count) give zeros (vocabulary-parallel ranks)
void gather_rows(const void* table, const int32_t* ids, void* out, int tokens, int hidden, int first, int count, float scale, Type type, Stream stream);
// Copies whole KV blocks of one layer: pairs [count][2] of (source, destination); no destination may be a source.
void copy_blocks(void* cache, const int32_t* pairs, int count, int64_t block_bytes, Stream stream);

// ---- sampling.cu

// A sequence's logits-processor record, beside the parameters in its job: consecutive 32-bit words.
//   touched [ceil(vocab / 32)]  bit i: token i has a mark
//   marks [vocab]               the bits below
//   listed [num_listed]         ascending by token
//   words [num_words]           token sequences that must not be completed
//   past [kMostWord - 1]        the sequence's last tokens, the newest at the end; -1: none
// If the sequence has penalties or words, a sampled token is counted here and appended to its past.
constexpr uint32_t kOutputs = 0x07ffffff;  // how often it was output
constexpr uint32_t kCompletes = 1u << 27;  // it would complete a word; recomputed for each sample, initially set for all that may
constexpr uint32_t kInPrompt = 1u << 28;   // it is in the prompt; set if the repetition penalty is on
constexpr uint32_t kBarred = 1u << 29;
constexpr uint32_t kAllowed = 1u << 30;
constexpr uint32_t kListed = 1u << 31;

struct Listed {
  int32_t token;
  float bias;  // added; -inf: the token ends the sequence and is masked before the job's ends_from
};

constexpr int kMostWord = 8;
struct BadWord {
  int32_t tokens[kMostWord];  // right-aligned; -1 before them
};

// Sampling parameters of one sequence; workers/sampling/native_sampler.py documents each.
struct SampleJob {
  uint64_t seed;
  double temperature;
  double top_p;      // 1: off
  double min_depth;  // temperature * log(min_p); -inf: off
  void* record;      // its logits-processor record; null: none, and the fields up to the penalties are ignored
  int32_t choice;
  int32_t top_k;     // 0: off
  int32_t is_greedy;
  int32_t only_allowed;  // tokens without that mark are masked
  int32_t num_listed;
  int32_t num_words;
  int32_t ends_from;     // position from which the sequence may end
  float repetition_penalty;  // 1: off, and the next two at 0
  float frequency_penalty;
  float presence_penalty;
  int32_t unused;
  int32_t num_logprobs;  // 0: none; 1: the sampled token's; 1 + k: also those of the k most likely
};

constexpr int kMostLogprobs = 21;

// Under the model's logits before processors; unused entries have id -1 and -inf.
struct Logprobs {
  int32_t rank;  // of the token; 1: none is more likely
  int32_t ids[kMostLogprobs];
  float values[kMostLogprobs];
};

struct SampleArgs {
  const void* logits;  // [rows, vocab], rows logits_stride apart
  int64_t logits_stride;
  Type type;
  int rows, vocab;
  const SampleJob* jobs;     // [slots]
  const int32_t* slots;      // [rows], the job of each sequence, negative: not sampled; null: row i has job i
  const int32_t* positions;  // [rows], index that the new token will have
  int32_t* tokens;           // [rows]; -2: the logits are not finite, -3: every token is masked
  Logprobs* logprobs;        // [rows] or null; written if a token is sampled and its job requests them
};
void sample_rows(const SampleArgs& args, Stream stream);

}  // namespace trireme::cuda
