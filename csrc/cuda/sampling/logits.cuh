// One sequence's logits as the sampler reads them: from the model, or after its logits processors, whose meaning and order are those
// of workers/logits_processors.py, in float32 with one rounding each. Used by sampling.cu.
//
// A processor record (see SampleJob in ops.h) has a bit for every token that a processor may affect; other tokens cost only that bit.
#pragma once

#include "cuda/device.cuh"

namespace trireme::cuda {

__device__ __forceinline__ int touched_words(int vocab) { return (vocab + 31) / 32; }

// Adds everything listed for a token; an end token, listed with -inf, is masked while the sequence is too short.
__device__ __forceinline__ float biased(const SampleJob& job, const Listed* listed, int position, int token, float x) {
  int low = 0;
  for (int high = job.num_listed; low < high;) {
    const int middle = (low + high) / 2;
    if (listed[middle].token < token) low = middle + 1;
    else high = middle;
  }
  for (; low < job.num_listed && listed[low].token == token; ++low) {
    const float bias = listed[low].bias;
    if (bias > -INFINITY || position < job.ends_from) x = __fadd_rn(x, bias);
  }
  return x;
}

__device__ __forceinline__ BadWord* words_of(const SampleJob& job, int vocab) {
  return reinterpret_cast<BadWord*>(static_cast<uint32_t*>(job.record) + touched_words(vocab) + vocab + 2 * job.num_listed);
}
__device__ __forceinline__ int32_t* past_of(const SampleJob& job, int vocab) { return reinterpret_cast<int32_t*>(words_of(job, vocab) + job.num_words); }

// Marks exactly the tokens that would complete a word now; executed by a whole CTA.
__device__ __forceinline__ void mark_completing(const SampleJob& job, int vocab) {
  if (job.num_words == 0) return;
  uint32_t* marks = static_cast<uint32_t*>(job.record) + touched_words(vocab);
  const BadWord* words = words_of(job, vocab);
  const int32_t* past = past_of(job, vocab);
  for (int i = threadIdx.x; i < job.num_words; i += blockDim.x) atomicAnd(&marks[words[i].tokens[kMostWord - 1]], ~kCompletes);
  __syncthreads();
  for (int i = threadIdx.x; i < job.num_words; i += blockDim.x) {
    bool is_next = true;
    for (int j = 0; j < kMostWord - 1; ++j) is_next &= words[i].tokens[j] < 0 || words[i].tokens[j] == past[j];
    if (is_next) atomicOr(&marks[words[i].tokens[kMostWord - 1]], kCompletes);
  }
  __syncthreads();
}

// The logit of a token with a mark.
__device__ __forceinline__ float marked_logit(const SampleJob* job, int vocab, int position, int token, float x) {
  const uint32_t* marks = static_cast<const uint32_t*>(job->record) + touched_words(vocab);
  const uint32_t mark = marks[token];
  if ((mark & (kBarred | kCompletes)) != 0 || (job->only_allowed != 0 && (mark & kAllowed) == 0)) return -INFINITY;
  const uint32_t count = mark & kOutputs;
  if (count > 0 || (mark & kInPrompt) != 0) {
    const float rate = job->repetition_penalty;
    if (rate != 1.0f) x = x > 0.0f ? __fdiv_rn(x, rate) : __fmul_rn(x, rate);
    x = __fsub_rn(x, __fmul_rn(job->frequency_penalty, static_cast<float>(count)));
    if (count > 0) x = __fsub_rn(x, job->presence_penalty);
  }
  if ((mark & kListed) == 0) return x;
  return biased(*job, reinterpret_cast<const Listed*>(marks + vocab), position, token, x);
}

template <class T>
struct PlainRow {
  using Value = T;
  static constexpr bool kInPacks = true;  // use 16-byte loads
  const T* logits;
  __device__ __forceinline__ float ruled(int, float x) const { return x; }
  __device__ __forceinline__ float operator()(int i) const { return to_float(logits[i]); }
};

template <class T>
struct RuledRow {
  using Value = T;
  static constexpr bool kInPacks = false;
  const T* logits;
  const SampleJob* job;
  const uint32_t* touched;
  int vocab, position;
  float untouched;  // -inf: only allowed tokens remain

  __device__ RuledRow(const T* row, const SampleJob* asked, int size, int at)
      : logits(row), job(asked), touched(static_cast<const uint32_t*>(asked->record)), vocab(size), position(at),
        untouched(asked->only_allowed != 0 ? -INFINITY : 0.0f) {}

  __device__ __forceinline__ float ruled(int i, float x) const {
    return (touched[i / 32] >> (i % 32) & 1u) != 0 ? marked_logit(job, vocab, position, i, x) : x + untouched;
  }
  __device__ __forceinline__ float operator()(int i) const { return ruled(i, to_float(logits[i])); }
};

// Records a sampled token of the sequence.
__device__ __forceinline__ void note_output(const SampleJob& job, int vocab, int token) {
  if (job.num_words > 0) {
    int32_t* past = past_of(job, vocab);
    for (int i = 0; i + 1 < kMostWord - 1; ++i) past[i] = past[i + 1];
    past[kMostWord - 2] = token;
  }
  if (job.repetition_penalty == 1.0f && job.frequency_penalty == 0.0f && job.presence_penalty == 0.0f) return;
  uint32_t* touched = static_cast<uint32_t*>(job.record);
  touched[token / 32] |= 1u << token % 32;
  touched[touched_words(vocab) + token] += 1;
}

}  // namespace trireme::cuda
