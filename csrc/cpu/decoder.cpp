#include "cpu/decoder.h"

#include <algorithm>

#include "cpu/threads.h"

namespace trireme {

namespace {

// out [tokens, out_width] (+)= x [tokens, width] W^T of every piece.
void multiply(const LinearPieces& pieces, int tokens, const float* x, int width, float* out, int out_width, bool accumulate) {
  for (const LinearPiece& piece : pieces) {
    linear(*piece.weight, LinearArgs{x, width, tokens, out + piece.column, out_width, piece.bias, accumulate});
  }
}

void norm_rows(const float* x, const float* weight, float* out, int64_t stride, int rows, int width, float eps) {
  NormArgs a{};
  a.x = x;
  a.weight = weight;
  a.out = out;
  a.x_stride = a.out_stride = stride;
  a.rows = rows;
  a.width = width;
  a.eps = eps;
  rms_norm(a);
}

// hidden += scale * branch; scale * branch is rounded before the add.
void add_scaled(float* hidden, const float* branch, float scale, int rows, int width) {
  const auto add = [&](int row) {
    float* to = hidden + static_cast<int64_t>(row) * width;
    const float* from = branch + static_cast<int64_t>(row) * width;
    for (int i = 0; i < width; ++i) to[i] += from[i] * scale;
  };
  if (static_cast<int64_t>(rows) * width >= 65536) return parallel(rows, [&](int row, int) { add(row); });
  for (int row = 0; row < rows; ++row) add(row);
}

}  // namespace

void DecoderStage::bind_kv(KvType type, int block_size, const std::vector<std::pair<void*, void*>>& caches) {
  kv_type_ = type;
  block_size_ = block_size;
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].k_cache = caches[i].first;
    layers_[i].v_cache = caches[i].second;
  }
}

void DecoderStage::run(const StepInputs& in, const StepBuffers& buffers) const {
  const int q_width = shape_.q_heads * shape_.dim;
  const int qkv_width = q_width + 2 * shape_.kv_heads * shape_.dim;
  for (const DecoderLayer& layer : layers_) {
    const float* x = branch_input(layer.attn_norm, in, buffers);
    multiply(layer.qkv, in.tokens, x, shape_.hidden, buffers.qkv, qkv_width, false);
    attend(layer, in, buffers);
    join(layer.o, buffers.attended, q_width, layer.attn_post, in.tokens, buffers.hidden, buffers.normed);
    feed_forward(layer, in, buffers);
  }
}

void DecoderStage::feed_forward(const DecoderLayer& layer, const StepInputs& in, const StepBuffers& buffers) const {
  const int ffn = shape_.ffn;
  const float* x = branch_input(layer.ffn_norm, in, buffers);
  for (int first = 0; first < in.tokens; first += kFeedForwardRows) {
    const int rows = std::min(kFeedForwardRows, in.tokens - first);
    const int64_t at = static_cast<int64_t>(first) * shape_.hidden;
    multiply(layer.gate_up, rows, x + at, shape_.hidden, buffers.gate_up, 2 * ffn, false);
    swiglu(SwigluArgs{buffers.gate_up, 2 * ffn, buffers.product, ffn, rows, ffn, shape_.activation});
    join(layer.down, buffers.product, ffn, layer.ffn_post, rows, buffers.hidden + at, buffers.normed + at);
  }
}

const float* DecoderStage::branch_input(const float* weight, const StepInputs& in, const StepBuffers& buffers) const {
  if (weight == nullptr) return buffers.hidden;
  norm_rows(buffers.hidden, weight, buffers.normed, shape_.hidden, in.tokens, shape_.hidden, shape_.eps);
  return buffers.normed;
}

// Ends a branch: the last linear layer of x, with the family's post-norm and scale, added to the residual stream. `branch` may
// alias the buffer that x was computed from.
void DecoderStage::join(const LinearPieces& last, const float* x, int width, const float* post, int tokens, float* hidden,
                        float* branch) const {
  if (post == nullptr && shape_.residual_scale == 1.0f) {
    return multiply(last, tokens, x, width, hidden, shape_.hidden, true);
  }
  multiply(last, tokens, x, width, branch, shape_.hidden, false);
  if (post != nullptr) norm_rows(branch, post, branch, shape_.hidden, tokens, shape_.hidden, shape_.eps);
  add_scaled(hidden, branch, shape_.residual_scale, tokens, shape_.hidden);
}

void DecoderStage::attend(const DecoderLayer& layer, const StepInputs& in, const StepBuffers& buffers) const {
  const int64_t q_width = static_cast<int64_t>(shape_.q_heads) * shape_.dim;
  const int64_t kv_width = static_cast<int64_t>(shape_.kv_heads) * shape_.dim;
  RopeArgs rope{};
  rope.q = buffers.qkv;
  rope.k = buffers.qkv + q_width;
  rope.v = buffers.qkv + q_width + kv_width;
  rope.q_stride = rope.k_stride = rope.v_stride = q_width + 2 * kv_width;
  rope.tokens = in.tokens;
  rope.q_heads = shape_.q_heads;
  rope.cos_sin = layer.cos_sin;
  rope.rot = layer.rot;
  rope.positions = in.positions;
  rope.slots = in.slots;
  rope.kv = KvView{layer.k_cache, layer.v_cache, kv_type_, shape_.kv_heads, shape_.dim, block_size_};
  if (shape_.wide_qk_norm) {
    float* k = buffers.qkv + q_width;
    norm_rows(rope.q, layer.q_norm, rope.q, rope.q_stride, in.tokens, static_cast<int>(q_width), shape_.eps);
    norm_rows(k, layer.k_norm, k, rope.k_stride, in.tokens, static_cast<int>(kv_width), shape_.eps);
  } else {
    rope.q_norm = layer.q_norm;
    rope.k_norm = layer.k_norm;
  }
  rope.eps = shape_.eps;
  rope_and_cache(rope);

  AttentionArgs attention{};
  attention.q = rope.q;
  attention.q_stride = rope.q_stride;
  attention.q_heads = shape_.q_heads;
  attention.kv = rope.kv;
  attention.query_start = in.query_start;
  attention.context_len = in.context_len;
  attention.block_table = in.block_table;
  attention.rows = in.rows;
  attention.table_stride = in.table_stride;
  attention.scale = shape_.scale;
  attention.softcap = shape_.softcap;
  attention.window = layer.window;
  attention.out = buffers.attended;
  attention.out_stride = q_width;
  paged_attention(attention);
}

}  // namespace trireme
