// The sampler over whole vocabularies: from logits to tokens and log-probabilities, sequences in parallel. Called by
// bind/sampling.cpp; workers/sampling/sampler.py is the numpy version that defines every decision, and recomputes a sequence
// whose result is kUndecided. A sequence's results depend only on its own logits and job.
#pragma once

#include <cstdint>

namespace trireme {

// Noise of workers/sampling/gumbel.py.
uint64_t noise_key(uint64_t seed, int choice, int position);

// Sampling parameters of one sequence. workers/sampling/sampler.py has the same layout as a numpy dtype; ids in it are in range.
struct SampleJob {
  uint64_t seed;
  int32_t choice;
  int32_t position;  // index that the new token will have in its sequence
  double temperature;
  double top_p;      // 1: off
  double min_depth;  // temperature * log(min_p); -inf: off
  int32_t top_k;     // 0: off
  int32_t logprobs;  // -1: none
  int32_t is_greedy;
  float repetition_penalty;  // 1: off, and the next two at 0
  float frequency_penalty;
  float presence_penalty;
  int32_t num_seen;  // tokens that the penalties cover; their counts in the output
  int32_t num_bias;
  int32_t num_allowed;  // 0: all
  int32_t num_barred;
  const int64_t* seen;
  const int32_t* seen_counts;
  const int64_t* bias_ids;
  const float* bias;
  const int64_t* allowed;
  const int64_t* barred;
};

// Error codes in place of a token.
inline constexpr int kUndecided = -1;   // two tokens are too close for the precision of these logarithms
inline constexpr int kNotFinite = -2;   // the logits hold NaN or +inf, or nothing finite
inline constexpr int kNothingLeft = -3; // every token is masked

struct SampleArgs {
  const float* logits;  // [rows, vocab], rows logits_stride apart
  int64_t logits_stride;
  int rows;
  int vocab;
  const SampleJob* jobs;  // [rows]
  int32_t* tokens;        // [rows]
  float* peaks;           // [rows], max logit of each sequence
  int num_best;           // maximum `logprobs` of the jobs, at most 64
  int32_t* best_ids;      // [rows, 1 + num_best]: the token, then the most likely ones; padded with -1 and -inf
  float* logprobs;        // [rows, 1 + num_best]
  int32_t* ranks;         // [rows]
};

void sample_rows(const SampleArgs& a);

// Log-probabilities of targets[i] and of the num_best most likely tokens of each sequence; kNotFinite in ranks[i] if undefined.
struct LogprobArgs {
  const float* logits;
  int64_t logits_stride;
  int rows;
  int vocab;
  const int32_t* targets;
  int num_best;
  int32_t* best_ids;
  float* logprobs;
  int32_t* ranks;
};

void logprob_rows(const LogprobArgs& a);

// Winner of the Gumbel-max draw over one sequence with the max logit `peak`, or kUndecided.
int race(const float* logits, int size, float peak, double temperature, uint64_t key);

// ---------------------------------------------------------------- between driver and kernels

inline constexpr int kMaxBest = 64;

// Scratch memory of one thread: arrays over one vocabulary.
struct SampleScratch {
  float* group_max;  // [groups_of(vocab)]
  float* row;        // [vocab + 16], and the next four
  float* logits;
  int32_t* ids;
  uint32_t* keys;
  int32_t* masses;
};

struct SampleKernels {
  void (*sample_row)(const SampleArgs& a, int row, const SampleScratch& scratch);
  void (*logprob_row)(const LogprobArgs& a, int row, const SampleScratch& scratch);
  int (*race)(const float* logits, int size, float peak, double temperature, uint64_t key);
};

const SampleKernels& sample_kernels_portable();
const SampleKernels& sample_kernels_avx2();
const SampleKernels& sample_kernels_avx512();

}  // namespace trireme
