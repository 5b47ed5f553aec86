// The draw over a whole vocabulary: finds the few tokens that can win the Gumbel race of workers/noise.py, which defines
// the noise and decides among them in float64. Called by bind_sampling.cpp; one thread per call, no state.
#pragma once

#include <cstdint>

namespace trireme {

struct RaceArgs {
  const float* logits;  // [size]; -inf is a token that cannot be drawn
  int size;
  float peak;  // the greatest logit, finite
  float inverse_temperature;
  uint32_t key_low;
  uint32_t key_high;
  int32_t* rivals;  // [capacity], rising
  int capacity;
};

// Number of tokens written to `rivals`, among which the exact winner is; -1 when they are more than `capacity`.
int race(const RaceArgs& a);

int race_portable(const RaceArgs& a);
int race_avx2(const RaceArgs& a);
int race_avx512(const RaceArgs& a);

}  // namespace trireme
