// The kernels of sampling.h for one instruction set. Included by sampling_*.cpp.
//
// Truncation never sorts a vocabulary. The maxima of groups of 16 tokens give a lower bound on the k-th value; the cut itself is
// a radix search over the few tokens above it. Top-p masses are integers (workers/sampling/top_k_top_p.py defines them), so
// sums are exact in any order and numpy finds the same cut.
//
// The draw is argmin(E * e^depth) with depth = (peak - logit) / temperature and E >= v. The float bits of v, read as an
// integer, bound log2(v) from below, so a token whose bound exceeds the leader's log2(E * e^depth) is ruled out without a
// logarithm; the others, a dozen or two, are scored in double.
#pragma once

#include <cmath>

#include "cpu/sampling/sampling.h"
#include "cpu/simd16.h"

namespace trireme::TRIREME_VARIANT {

inline constexpr int kTile = 256;  // tokens processed together; a group is one lane of it
inline constexpr int kBins = 2048;
inline constexpr int kBinBits = 11;
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kSlack = 1e-3f;      // exceeds the float32 error of a bound near the leader's
inline constexpr double kTooClose = 1e-9;   // scores closer than this are left to the reference
inline constexpr float kLowest = -3.40282347e+38f;

TRIREME_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// Tokens still in the draw, ascending; no ids: all of them.
struct Tokens {
  const int32_t* ids;
  const float* logits;
  int size;
  int id(int i) const { return ids == nullptr ? i : ids[i]; }
};

// ---------------------------------------------------------------- maxima

// group_max[16 * tile + lane] = max of the tile's tokens in that lane. Returns the overall max, NaN if there is one.
static float scan_row(const float* logits, int size, float* group_max) {
  Vec best = set1(-INFINITY);
  uint32_t widest = 0;
  for (int first = 0, tile = 0; first < size; first += kTile, ++tile) {
    const int count = smaller(kTile, size - first);
    const float* x = logits + first;
    Vec here = set1(-INFINITY);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) here = max(here, load(x + i));
    if (i < count) here = max(here, keep_lanes(load_first(x + i, count - i), 0, count - i, set1(-INFINITY)));
    store(group_max + tile * kLanes, here);
    best = max(best, here);
    for (i = 0; i < count; ++i) {
      const uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
      widest = bits > widest ? bits : widest;
    }
  }
  return widest > 0x7f800000u ? NAN : reduce_max(best);
}

TRIREME_INLINE bool reaches(const float* group_max, int tile, float floor) {
  return reduce_max(load(group_max + tile * kLanes)) >= floor;
}

// Bit per lane: x >= floor.
TRIREME_INLINE uint32_t lanes_reaching(Vec x, float floor) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(floor), _CMP_GE_OQ);
#elif defined(__AVX2__)
  const __m256 limit = _mm256_set1_ps(floor);
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.lo, limit, _CMP_GE_OQ));
  return static_cast<uint32_t>(low | _mm256_movemask_ps(_mm256_cmp_ps(x.hi, limit, _CMP_GE_OQ)) << 8);
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(x.q[i / 4][i % 4] >= floor) << i;
  return mask;
#endif
}

static int first_of(const float* logits, int size, const float* group_max, float value) {
  for (int first = 0, tile = 0; first < size; first += kTile, ++tile) {
    if (!reaches(group_max, tile, value)) continue;
    for (int i = first; i < smaller(size, first + kTile); ++i) {
      if (logits[i] == value) return i;
    }
  }
  return 0;
}

// Collects tokens whose logit is at least floor, in scratch.
static Tokens tokens_above(const float* logits, int size, float floor, const SampleScratch& scratch) {
  int n = 0;
  for (int first = 0; first < size; first += kLanes) {
    if (first % kTile == 0 && !reaches(scratch.group_max, first / kTile, floor)) {
      first += kTile - kLanes;
      continue;
    }
    const int count = smaller(kLanes, size - first);
    const Vec x = count == kLanes ? load(logits + first) : load_first(logits + first, count);
    for (uint32_t mask = lanes_reaching(x, floor) & ((1u << count) - 1u); mask != 0; mask &= mask - 1u) {
      const int i = first + __builtin_ctz(mask);
      scratch.ids[n] = i;
      scratch.logits[n++] = logits[i];
    }
  }
  return {scratch.ids, scratch.logits, n};
}

// Keeps those of `tokens` with keep(i), in scratch, possibly in place.
template <class Keep>
TRIREME_INLINE Tokens keep_tokens(const Tokens& tokens, const SampleScratch& scratch, Keep keep) {
  int n = 0;
  for (int i = 0; i < tokens.size; ++i) {
    const int32_t id = tokens.id(i);
    const float logit = tokens.logits[i];
    const bool stays = keep(i);
    scratch.ids[n] = id;
    scratch.logits[n] = logit;
    n += stays;
  }
  return {scratch.ids, scratch.logits, n};
}

// ---------------------------------------------------------------- cuts

// Increases as the value decreases; equal for the two zeros.
TRIREME_INLINE uint32_t falling_key(float value) {
  const uint32_t bits = float_to_bits(value + 0.0f);
  return (bits >> 31) != 0 ? bits : 0x7fffffffu - bits;
}

struct Cut {
  uint32_t key;  // tokens with a smaller key are kept,
  int64_t ties;  // and this many, in ascending id order, of those with it
};

// The shortest prefix by (key, index) whose masses (1 each if null) reach `target`, which the total does reach. Destroys keys
// and masses.
static Cut find_cut(uint32_t* keys, int32_t* masses, int size, double target) {
  uint32_t low = 0xffffffffu, high = 0;
  for (int i = 0; i < size; ++i) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  const auto goal = static_cast<int64_t>(std::ceil(target));  // sums are integers
  int64_t before = 0, bins[kBins];
  for (;;) {
    const int width = low == high ? 0 : 32 - __builtin_clz(high - low);
    const int shift = width > kBinBits ? width - kBinBits : 0;
    std::memset(bins, 0, sizeof(bins));
    for (int i = 0; i < size; ++i) bins[(keys[i] - low) >> shift] += masses == nullptr ? 1 : masses[i];
    uint32_t bin = 0;
    while (bin + 1 < kBins && before + bins[bin] < goal) before += bins[bin++];
    low += bin << shift;
    int n = 0;
    for (int i = 0; i < size; ++i) {
      if ((keys[i] - low) >> shift != 0) continue;  // nearly all
      keys[n] = keys[i];
      if (masses != nullptr) masses[n] = masses[i];
      ++n;
    }
    size = n;
    high = low + ((1u << shift) - 1u);
    if (shift == 0) break;
  }
  const int64_t mass = masses == nullptr ? 1 : masses[0];
  if (mass < 1) return {low, size};
  const int64_t ties = (goal - before + mass - 1) / mass;
  return {low, ties < 1 ? 1 : ties};
}

template <class Key>
TRIREME_INLINE Tokens apply_cut(const Tokens& tokens, Cut cut, const SampleScratch& scratch, Key key_of) {
  int64_t ties = cut.ties;
  return keep_tokens(tokens, scratch, [&](int i) {
    const uint32_t key = key_of(tokens.logits[i]);
    const bool is_tie = key == cut.key;
    const bool stays = (key < cut.key) | (is_tie & (ties > 0));
    ties -= is_tie;
    return stays;
  });
}

// A value that at least k of the tokens reach; the lowest finite number if fewer than k groups have one.
static float floor_of_top(int size, int k, const SampleScratch& scratch) {
  const int groups = (size + kTile - 1) / kTile * kLanes;
  if (k > groups) return kLowest;
  for (int i = 0; i < groups; ++i) scratch.keys[i] = falling_key(scratch.group_max[i]);
  const uint32_t key = find_cut(scratch.keys, nullptr, groups, k).key;
  const float floor = bits_to_float(key > 0x7fffffffu ? key : 0x7fffffffu - key);
  return floor > kLowest ? floor : kLowest;
}

static Tokens top_k(const float* logits, int size, int k, const SampleScratch& scratch) {
  const Tokens tokens = tokens_above(logits, size, floor_of_top(size, k, scratch), scratch);
  if (tokens.size <= k) return tokens;
  for (int i = 0; i < tokens.size; ++i) scratch.keys[i] = falling_key(tokens.logits[i]);
  const Cut cut = find_cut(scratch.keys, nullptr, tokens.size, k);
  return apply_cut(tokens, cut, scratch, [](float logit) { return falling_key(logit); });
}

struct Heat {
  float peak;
  float rate;  // 1 / temperature
};

TRIREME_INLINE float depth_of(float logit, Heat heat) { return (heat.peak - logit) * heat.rate; }

// Increases with the depth; equal for the two zeros.
TRIREME_INLINE uint32_t depth_key(float logit, Heat heat) { return float_to_bits(depth_of(logit, heat) + 0.0f); }

// e^-depth in units of 2^-30, plus 1/2: to be truncated to an integer. No fused operations, as numpy has none.
TRIREME_INLINE Vec heavy_mass(Vec logits, Heat heat) {
  const Vec depth = mul(sub(set1(heat.peak), logits), set1(heat.rate));
  const Vec y = max(set1(-32.0f), mul(depth, set1(-kLog2E)));
  const Vec n = round(y);
  const Vec f = sub(y, n);
  Vec p = set1(1.5403530e-4f);
  p = add(mul(p, f), set1(1.3333558e-3f));
  p = add(mul(p, f), set1(9.6181291e-3f));
  p = add(mul(p, f), set1(5.5504109e-2f));
  p = add(mul(p, f), set1(2.4022651e-1f));
  p = add(mul(p, f), set1(6.9314718e-1f));
  p = add(mul(p, f), set1(1.0f));
  return add(scale_pow2(p, add(n, set1(30.0f))), set1(0.5f));
}

inline constexpr int kSteps = 4;  // depths 3, 6, 9, 12, for which the first pass collects masses
inline constexpr float kStepDepth = 3.0f;

TRIREME_INLINE float step_floor(int step, Heat heat) {
  return heat.peak - kStepDepth * static_cast<float>(step + 1) / heat.rate;
}

// Integer masses of `logits`, and their sum. `above`, if given, gets the approximate mass down to each step.
static int64_t masses_of(const float* logits, int size, Heat heat, int32_t* masses, float* above = nullptr) {
  int64_t total = 0;
  Vec steps[kSteps], floors[kSteps];
  for (int step = 0; step < kSteps; ++step) {
    steps[step] = zero();
    floors[step] = set1(step_floor(step, heat));
  }
  alignas(64) float wide[kTile];
  for (int first = 0; first < size; first += kTile) {
    const int count = smaller(kTile, size - first);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(wide + i, heavy_mass(load(logits + first + i), heat));
    if (i < count) store(wide + i, heavy_mass(load_first(logits + first + i, count - i), heat));
    if (above != nullptr) {
      for (int k = 0; k + kLanes <= count; k += kLanes) {
        const Vec mass = load(wide + k), x = load(logits + first + k);
        for (int step = 0; step < kSteps; ++step) steps[step] = add(steps[step], zero_below(mass, x, floors[step]));
      }
    }
    int64_t sum = 0;
    if (masses == nullptr) {
      for (i = 0; i < count; ++i) sum += static_cast<int32_t>(wide[i]);
    } else {
      for (i = 0; i < count; ++i) {
        masses[first + i] = static_cast<int32_t>(wide[i]);
        sum += masses[first + i];
      }
    }
    total += sum;
  }
  for (int step = 0; above != nullptr && step < kSteps; ++step) above[step] = reduce_add(steps[step]);
  return total;
}

// A logit above which the tokens that reach `target` certainly or probably lie.
TRIREME_INLINE float floor_of_mass(const float* above, double target, double p, int64_t total, int size, Heat heat) {
  for (int step = 0; step < kSteps; ++step) {
    if (static_cast<double>(above[step]) >= target * 1.0001) return step_floor(step, heat);
  }
  // Tokens lighter than an equal share of what may be dropped weigh less than that together.
  const double part = (1.0 - p) * static_cast<double>(total) / size * 0.99;
  const double deepest = part > 1.0 ? 30.0 * 0.6931471805599453 - std::log(part) : INFINITY;
  return heat.peak - static_cast<float>(deepest / heat.rate);
}

static Tokens top_p(const Tokens& all, Heat heat, double p, const SampleScratch& scratch) {
  const bool is_row = all.ids == nullptr;
  float above[kSteps];
  const int64_t total =
      masses_of(all.logits, all.size, heat, is_row ? nullptr : scratch.masses, is_row ? above : nullptr);
  const double target = p * static_cast<double>(total);
  Tokens tokens = all;
  if (is_row) {  // the sum shows whether the floor was low enough
    const float floor = floor_of_mass(above, target, p, total, all.size, heat);
    tokens = tokens_above(all.logits, all.size, floor > kLowest ? floor : kLowest, scratch);
    if (static_cast<double>(masses_of(tokens.logits, tokens.size, heat, scratch.masses)) < target) {
      tokens = tokens_above(all.logits, all.size, kLowest, scratch);
      masses_of(tokens.logits, tokens.size, heat, scratch.masses);
    }
  }
  for (int i = 0; i < tokens.size; ++i) scratch.keys[i] = depth_key(tokens.logits[i], heat);
  const Cut cut = find_cut(scratch.keys, scratch.masses, tokens.size, target);
  return apply_cut(tokens, cut, scratch, [&](float logit) { return depth_key(logit, heat); });
}

static Tokens min_p(const Tokens& tokens, float floor, const SampleScratch& scratch) {
  if (tokens.ids == nullptr) return tokens_above(tokens.logits, tokens.size, floor, scratch);
  return keep_tokens(tokens, scratch, [&](int i) { return tokens.logits[i] >= floor; });
}

// ---------------------------------------------------------------- the draw

TRIREME_INLINE uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct Key {
  uint32_t low;
  uint32_t high;
};

TRIREME_INLINE uint32_t token_hash(uint32_t token, Key key) {
  return mix32(mix32((token * 0x9E3779B9u) ^ key.low) + key.high);
}

struct Leader {
  int id = kUndecided;
  double score = -INFINITY;
  double second = -INFINITY;
  float limit = INFINITY;  // of the bounds that can still win

  void consider(int token, float logit, float peak, double temperature, Key key) {
    if (token == id) return;
    const double v = (static_cast<double>(token_hash(static_cast<uint32_t>(token), key)) + 0.5) * 0x1p-32;
    const double mine = (static_cast<double>(logit) - peak) / temperature - std::log(-std::log1p(-v));
    if (mine <= score) {
      second = mine > second ? mine : second;
      return;
    }
    second = score;
    score = mine;
    id = token;
    limit = static_cast<float>(-mine * 1.4426950408889634) + kSlack;
  }
};

// bounds[i] <= log2(v * e^depth) of the i-th token from `first` on; infinity past the end.
TRIREME_INLINE void bound_tile(const Tokens& tokens, int first, Heat heat, Key key, float* bounds) {
  const int count = smaller(kTile, tokens.size - first);
  const float* logits = tokens.logits + first;
  const float rate = heat.rate * kLog2E;
  uint32_t hashes[kTile];
  if (tokens.ids == nullptr) {
    for (int i = 0; i < kTile; ++i) hashes[i] = token_hash(static_cast<uint32_t>(first + i), key);
  } else {
    for (int i = 0; i < count; ++i) hashes[i] = token_hash(static_cast<uint32_t>(tokens.ids[first + i]), key);
  }
  for (int i = 0; i < count; ++i) {
    const float v = static_cast<float>(static_cast<int32_t>(hashes[i] >> 1)) * 0x1p-31f;
    const float log2_v = static_cast<float>(static_cast<int32_t>(float_to_bits(v))) * 0x1p-23f - 127.0f;
    bounds[i] = log2_v + (heat.peak - logits[i]) * rate;
  }
  for (int i = count; i < kTile; ++i) bounds[i] = INFINITY;
}

TRIREME_INLINE float least(const float* bounds) {
  Vec best = load(bounds);
  for (int i = kLanes; i < kTile; i += kLanes) best = min(best, load(bounds + i));
  return -reduce_max(sub(zero(), best));
}

// Winner among `tokens`; token `best` has the max logit, `peak`.
static int race_among(const Tokens& tokens, int best, float peak, double temperature, uint64_t key64) {
  const Key key = {static_cast<uint32_t>(key64), static_cast<uint32_t>(key64 >> 32)};
  const Heat heat = {peak, static_cast<float>(1.0 / temperature)};
  Leader leader;
  leader.consider(best, peak, peak, temperature, key);
  alignas(64) float bounds[kTile];
  for (int first = 0; first < tokens.size; first += kTile) {
    bound_tile(tokens, first, heat, key, bounds);
    if (!(least(bounds) <= leader.limit)) continue;
    for (int i = 0; i < smaller(kTile, tokens.size - first); ++i) {
      if (bounds[i] <= leader.limit) {
        leader.consider(tokens.id(first + i), tokens.logits[first + i], peak, temperature, key);
      }
    }
  }
  return leader.second >= leader.score - kTooClose * (1.0 + std::fabs(leader.score)) ? kUndecided : leader.id;
}

static int race_all(const float* logits, int size, float peak, double temperature, uint64_t key) {
  int best = 0;
  while (best + 1 < size && logits[best] != peak) ++best;
  return race_among({nullptr, logits, size}, best, peak, temperature, key);
}

// ---------------------------------------------------------------- logits processors

static void penalise(const SampleJob& job, float* row) {
  for (int i = 0; i < job.num_seen; ++i) {
    float value = row[job.seen[i]];
    const float count = static_cast<float>(job.seen_counts[i]);
    if (job.repetition_penalty != 1.0f) {
      value = value > 0 ? value / job.repetition_penalty : value * job.repetition_penalty;
    }
    value -= job.frequency_penalty * count;
    value -= job.presence_penalty * (count > 0 ? 1.0f : 0.0f);
    row[job.seen[i]] = value;
  }
}

static void apply_rules(const SampleJob& job, const float* logits, int vocab, const SampleScratch& scratch) {
  float* row = scratch.row;
  std::memcpy(row, logits, static_cast<size_t>(vocab) * sizeof(float));
  penalise(job, row);
  for (int i = 0; i < job.num_bias; ++i) row[job.bias_ids[i]] += job.bias[i];
  if (job.num_allowed > 0) {
    std::memcpy(scratch.logits, row, static_cast<size_t>(vocab) * sizeof(float));
    for (int i = 0; i < vocab; ++i) row[i] = -INFINITY;
    for (int i = 0; i < job.num_allowed; ++i) row[job.allowed[i]] = scratch.logits[job.allowed[i]];
  }
  for (int i = 0; i < job.num_barred; ++i) row[job.barred[i]] = -INFINITY;
}

TRIREME_INLINE bool has_rules(const SampleJob& job) {
  return job.num_seen > 0 || job.num_bias > 0 || job.num_allowed > 0 || job.num_barred > 0;
}

// ---------------------------------------------------------------- log-probabilities

// Expects the group maxima in scratch. Writes 1 + num_best entries, padded with empty ones if k is smaller.
static void write_logprobs(const float* logits, int size, float peak, int target, int k, int num_best,
                           const SampleScratch& scratch, int32_t* ids, float* values, int32_t* rank) {
  const float own = logits[target];
  double total = 0.0;
  int above = 0;
  for (int first = 0; first < size; first += kTile) {
    const int count = smaller(kTile, size - first);
    const float* x = logits + first;
    Vec sum = zero();
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) sum = add(sum, exp(sub(load(x + i), set1(peak))));
    if (i < count) {
      const Vec rest = keep_lanes(load_first(x + i, count - i), 0, count - i, set1(-INFINITY));
      sum = add(sum, exp(sub(rest, set1(peak))));
    }
    total += static_cast<double>(reduce_add(sum));
    for (i = 0; i < count; ++i) above += x[i] > own;
  }
  const double shift = std::log(total);
  const auto value = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(peak) - shift);
  };
  for (int i = 0; i <= num_best; ++i) {
    ids[i] = -1;
    values[i] = -INFINITY;
  }
  ids[0] = target;
  values[0] = value(own);
  *rank = 1 + above;
  if (k == 0) return;
  const Tokens tokens = top_k(logits, size, k, scratch);
  float best[kMaxBest];
  for (int n = 0; n < tokens.size; ++n) {  // ascending ids, so a later equal goes behind
    int at = n;
    for (; at > 0 && best[at - 1] < tokens.logits[n]; --at) {
      best[at] = best[at - 1];
      ids[1 + at] = ids[at];
    }
    best[at] = tokens.logits[n];
    ids[1 + at] = tokens.ids[n];
  }
  for (int n = 0; n < tokens.size; ++n) values[1 + n] = value(best[n]);
}

static void logprob_row(const LogprobArgs& a, int row, const SampleScratch& scratch) {
  const float* logits = a.logits + row * a.logits_stride;
  const float peak = scan_row(logits, a.vocab, scratch.group_max);
  const int64_t at = static_cast<int64_t>(row) * (1 + a.num_best);
  if (!std::isfinite(peak)) {
    a.ranks[row] = kNotFinite;
    return;
  }
  write_logprobs(logits, a.vocab, peak, a.targets[row], a.num_best, a.num_best, scratch, a.best_ids + at, a.logprobs + at,
                 a.ranks + row);
}

// ---------------------------------------------------------------- one sequence

// `logits` are those after the logits processors, their group maxima in scratch.
static int draw(const SampleJob& job, const float* logits, int vocab, float peak, const SampleScratch& scratch) {
  const int best = first_of(logits, vocab, scratch.group_max, peak);
  if (job.is_greedy != 0) return best;
  Tokens tokens = {nullptr, logits, vocab};
  if (job.top_k > 0) tokens = top_k(logits, vocab, job.top_k, scratch);
  if (job.top_p < 1.0) tokens = top_p(tokens, Heat{peak, static_cast<float>(1.0 / job.temperature)}, job.top_p, scratch);
  if (job.min_depth > -INFINITY) {
    tokens = min_p(tokens, static_cast<float>(static_cast<double>(peak) + job.min_depth), scratch);
  }
  if (tokens.size == 1) return tokens.id(0);
  return race_among(tokens, best, peak, job.temperature, noise_key(job.seed, job.choice, job.position));
}

static void sample_row(const SampleArgs& a, int row, const SampleScratch& scratch) {
  const SampleJob& job = a.jobs[row];
  const float* logits = a.logits + row * a.logits_stride;
  const float raw_peak = scan_row(logits, a.vocab, scratch.group_max);
  a.peaks[row] = raw_peak;
  a.tokens[row] = kNotFinite;
  if (!std::isfinite(raw_peak)) return;
  if (has_rules(job)) {
    apply_rules(job, logits, a.vocab, scratch);
    const float peak = scan_row(scratch.row, a.vocab, scratch.group_max);
    a.tokens[row] = std::isfinite(peak) ? draw(job, scratch.row, a.vocab, peak, scratch) : kNothingLeft;
    if (job.logprobs >= 0) scan_row(logits, a.vocab, scratch.group_max);
  } else {
    a.tokens[row] = draw(job, logits, a.vocab, raw_peak, scratch);
  }
  if (job.logprobs < 0 || a.tokens[row] < 0) return;
  const int64_t at = static_cast<int64_t>(row) * (1 + a.num_best);
  write_logprobs(logits, a.vocab, raw_peak, a.tokens[row], job.logprobs, a.num_best, scratch, a.best_ids + at,
                 a.logprobs + at, a.ranks + row);
}

}  // namespace trireme::TRIREME_VARIANT
