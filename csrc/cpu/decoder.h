// All layers of a decoder stage on one rank in one call, without the interpreter in between. The same ops as
// TorchDecoder._run_layers in models/cpu/decoder.py, bit-identical. Called by bind/decoder.cpp; owns nothing: weights, tables
// and buffers belong to Python objects that outlive the stage.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/linear/linear.h"
#include "cpu/elementwise/ops.h"

namespace trireme {

// One matrix of a linear layer and its first output column; files that mix kinds have several.
struct LinearPiece {
  const PackedWeight* weight;
  const float* bias;  // or null
  int column;
};
using LinearPieces = std::vector<LinearPiece>;

struct DecoderLayer {
  // RMS norms before and after attention and feed-forward; null for none.
  const float* attn_norm;
  const float* ffn_norm;
  const float* q_norm;
  const float* k_norm;
  const float* attn_post;
  const float* ffn_post;
  const float* cos_sin;
  int rot;     // 0: not rotated
  int window;  // 0: none
  LinearPieces qkv, o, gate_up, down;
  void* k_cache;
  void* v_cache;
};

struct DecoderShape {
  int hidden;
  int q_heads;
  int kv_heads;
  int dim;
  int ffn;
  bool wide_qk_norm;  // q_norm and k_norm span all heads
  Activation activation;
  float eps;
  float scale;
  float softcap;
  float residual_scale;  // applied to each branch before the residual add
};

// Inputs of one step (see StepBatch in models/forward.py), all int32.
struct StepInputs {
  int tokens;
  int rows;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  int64_t table_stride;
};

// Tokens per pass through the feed-forward network: bounds its buffers, the widest of all.
constexpr int kFeedForwardRows = 256;

// Dense row-major buffers for at least `tokens` tokens; gate_up and product for at least min(tokens, kFeedForwardRows).
struct StepBuffers {
  float* hidden;    // the residual stream: input and output
  float* normed;
  float* qkv;
  float* attended;
  float* gate_up;
  float* product;
};

class DecoderStage {
 public:
  explicit DecoderStage(const DecoderShape& shape) : shape_(shape) {}
  void add_layer(DecoderLayer layer) { layers_.push_back(std::move(layer)); }
  size_t num_layers() const { return layers_.size(); }
  // KV caches of all layers; they share type and block size.
  void bind_kv(KvType type, int block_size, const std::vector<std::pair<void*, void*>>& caches);
  // One step through every layer. Not reentrant.
  void run(const StepInputs& in, const StepBuffers& buffers) const;

 private:
  void attend(const DecoderLayer& layer, const StepInputs& in, const StepBuffers& buffers) const;
  const float* branch_input(const float* weight, const StepInputs& in, const StepBuffers& buffers) const;
  void feed_forward(const DecoderLayer& layer, const StepInputs& in, const StepBuffers& buffers) const;
  void join(const LinearPieces& last, const float* x, int width, const float* post, int tokens, float* hidden,
            float* branch) const;

  DecoderShape shape_;
  std::vector<DecoderLayer> layers_;
  KvType kv_type_ = KvType::f32;
  int block_size_ = 0;
};

}  // namespace trireme
