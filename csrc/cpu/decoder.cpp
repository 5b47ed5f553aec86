#include "decoder.h"

namespace trireme {

namespace {

// out [tokens, out_width] (+)= x [tokens, width] times every piece.
void multiply(const LinearPieces& pieces, int tokens, const float* x, int width, float* out, int out_width, bool accumulate) {
  for (const LinearPiece& piece : pieces) {
    linear(*piece.weight, LinearArgs{x, width, tokens, out + piece.column, out_width, piece.bias, accumulate});
  }
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
    norm(layer.attn_norm, in, buffers);
    multiply(layer.qkv, in.tokens, buffers.normed, shape_.hidden, buffers.qkv, qkv_width, false);
    attend(layer, in, buffers);
    multiply(layer.o, in.tokens, buffers.attended, q_width, buffers.hidden, shape_.hidden, true);
    norm(layer.ffn_norm, in, buffers);
    multiply(layer.gate_up, in.tokens, buffers.normed, shape_.hidden, buffers.gate_up, 2 * shape_.ffn, false);
    swiglu(SwigluArgs{buffers.gate_up, 2 * shape_.ffn, buffers.product, shape_.ffn, in.tokens, shape_.ffn});
    multiply(layer.down, in.tokens, buffers.product, shape_.ffn, buffers.hidden, shape_.hidden, true);
  }
}

void DecoderStage::norm(const float* weight, const StepInputs& in, const StepBuffers& buffers) const {
  NormArgs a{};
  a.x = buffers.hidden;
  a.weight = weight;
  a.out = buffers.normed;
  a.x_stride = a.out_stride = a.width = shape_.hidden;
  a.rows = in.tokens;
  a.eps = shape_.eps;
  rms_norm(a);
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
  rope.cos_sin = shape_.cos_sin;
  rope.rot = shape_.rot;
  rope.positions = in.positions;
  rope.slots = in.slots;
  rope.kv = KvView{layer.k_cache, layer.v_cache, kv_type_, shape_.kv_heads, shape_.dim, block_size_};
  rope.q_norm = layer.q_norm;
  rope.k_norm = layer.k_norm;
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
  attention.window = layer.window;
  attention.out = buffers.attended;
  attention.out_stride = q_width;
  paged_attention(attention);
}

}  // namespace trireme
