// All layers of a decoder stage on one rank in one call, so that the interpreter takes no part between them. The same ops
// with the same results as Decoder._run_layers in models/cpu/decoder.py, so results are bit-identical. Called by
// bind/decoder.cpp; owns nothing: weights, tables and buffers belong to Python objects that outlive the stage.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/linear/linear.h"
#include "cpu/elementwise/ops.h"

namespace trireme {

// One matrix of a linear layer and the first of its output columns; files that mix kinds have several side by side.
struct LinearPiece {
  const PackedWeight* weight;
  const float* bias;  // or null
  int column;
};
using LinearPieces = std::vector<LinearPiece>;

struct DecoderLayer {
  // RMS norms before and after attention and feed-forward; null where there is none.
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
  bool wide_qk_norm;  // q_norm and k_norm are over all heads together
  Activation activation;
  float eps;
  float scale;
  float softcap;
  float residual_scale;  // of each branch before it is added
};

// Inputs of one step (see ForwardBatch in models/forward.py), all int32.
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

// Rows that pass through the feed-forward network at a time: its buffers, the widest of all, need no more.
constexpr int kFeedForwardRows = 256;

// Dense row-major buffers of at least `tokens` rows; gate_up and product of at least min(tokens, kFeedForwardRows).
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
  // Caches of all layers; type and block size are common to them.
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
