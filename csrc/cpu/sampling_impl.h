// The kernel of sampling.h for one instruction set. Included by sampling_*.cpp.
//
// The winner is argmax(-depth + g) = argmin(E * e^depth), where depth = (peak - logit) / temperature and E >= v. Per token
// the kernel takes a float32 lower bound of v * e^depth; the token with the least one (the leader) gives an upper bound of
// the winner's E * e^depth, and every token whose lower bound does not exceed it (by kSlack, for rounding) is a rival.
#pragma once

#include <algorithm>
#include <cmath>

#include "sampling.h"
#include "simd16.h"

namespace trireme::TRIREME_VARIANT {

inline constexpr int kTile = 256;         // tokens whose bounds are worked out at a time
inline constexpr int kMaxSpans = 1024;    // spans of tiles whose least bound is remembered
inline constexpr float kMaxDepth = 80.0f; // deeper than any noise reaches: the noise spans 26
inline constexpr double kSlack = 1.0 + 1e-3;

TRIREME_INLINE uint32_t mix32(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

TRIREME_INLINE uint32_t token_hash(uint32_t token, const RaceArgs& a) {
  return mix32(mix32((token * 0x9E3779B9u) ^ a.key_low) + a.key_high);
}

// bounds[i] = at most v * e^depth of token first + i; infinity past the end.
TRIREME_INLINE void bound_tile(const RaceArgs& a, int first, float* bounds) {
  const int count = std::min(kTile, a.size - first);
  for (int i = 0; i < kTile; ++i) {
    const uint32_t hash = token_hash(static_cast<uint32_t>(first + i), a);
    bounds[i] = static_cast<float>(static_cast<int32_t>(hash >> 1)) * 0x1p-31f;
  }
  const Vec peak = set1(a.peak), rate = set1(a.inverse_temperature), deepest = set1(kMaxDepth);
  for (int i = 0; i < count; i += kLanes) {
    const int n = std::min(kLanes, count - i);
    const Vec logits = n == kLanes ? load(a.logits + first + i) : load_first(a.logits + first + i, n);
    const Vec depth = min(mul(sub(peak, logits), rate), deepest);
    store(bounds + i, mul(load(bounds + i), exp(depth)));
  }
  for (int i = count; i < kTile; ++i) bounds[i] = INFINITY;
}

TRIREME_INLINE float least(const float* bounds) {
  Vec best = load(bounds);
  for (int i = kLanes; i < kTile; i += kLanes) best = min(best, load(bounds + i));
  float lanes[kLanes];
  store(lanes, best);
  return *std::min_element(lanes, lanes + kLanes);
}

// Upper bound of the winner's E * e^depth, from the token that leads.
static double winning_bound(const RaceArgs& a, int leader) {
  const double v = (static_cast<double>(token_hash(static_cast<uint32_t>(leader), a)) + 0.5) * 0x1p-32;
  const double depth = (static_cast<double>(a.peak) - a.logits[leader]) * a.inverse_temperature;
  return -std::log1p(-v) * std::exp(depth) * kSlack;
}

static int race(const RaceArgs& a) {
  const int num_tiles = (a.size + kTile - 1) / kTile;
  const int span = (num_tiles + kMaxSpans - 1) / kMaxSpans;  // tiles per span
  const int num_spans = (num_tiles + span - 1) / span;
  float bounds[kTile], span_least[kMaxSpans];
  int leading_tile = 0;
  float leading = INFINITY;
  for (int s = 0; s < num_spans; ++s) {
    span_least[s] = INFINITY;
    for (int tile = s * span; tile < std::min(num_tiles, (s + 1) * span); ++tile) {
      bound_tile(a, tile * kTile, bounds);
      const float here = least(bounds);
      span_least[s] = std::min(span_least[s], here);
      if (here < leading) {
        leading = here;
        leading_tile = tile;
      }
    }
  }
  bound_tile(a, leading_tile * kTile, bounds);
  const int leader = leading_tile * kTile + static_cast<int>(std::min_element(bounds, bounds + kTile) - bounds);
  const double limit = winning_bound(a, leader);
  int count = 0;
  for (int s = 0; s < num_spans; ++s) {
    if (!(span_least[s] <= limit)) continue;
    for (int tile = s * span; tile < std::min(num_tiles, (s + 1) * span); ++tile) {
      bound_tile(a, tile * kTile, bounds);
      for (int i = 0; i < kTile; ++i) {
        if (!(bounds[i] <= limit)) continue;
        if (count == a.capacity) return -1;
        a.rivals[count++] = tile * kTile + i;
      }
    }
  }
  return count;
}

}  // namespace trireme::TRIREME_VARIANT
