// Samples tokens from logits without sorting: greedy, temperature, top-k, top-p, min-p. One CTA per sequence.
//
// Decisions are those of workers/sampling/top_k_top_p.py and workers/sampling/gumbel.py: cuts are radix searches over float bits, top-p
// sums are integers and so exact in any order, the sample is argmax((logit - peak) / temperature + Gumbel noise), the noise a hash of
// (seed, choice, position, token). Only the few tokens that could win are scored in double. Logits processors are applied as logits are
// read; log-probabilities are those of the logits before them.
#include "cuda/device.cuh"
#include "cuda/sampling/logits.cuh"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kBinBits = 11;
constexpr int kBins = 1 << kBinBits;
constexpr float kSlack = 1.001f;

// ---------------------------------------------------------------- noise

__device__ __forceinline__ uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
__device__ __forceinline__ uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
__device__ __forceinline__ uint64_t noise_key(uint64_t seed, int choice, int position) {
  constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  uint64_t key = mix64(seed + golden);
  key = mix64(key + golden * (static_cast<uint64_t>(choice) + 1));
  return mix64(key + golden * (static_cast<uint64_t>(position) + 1));
}
__device__ __forceinline__ uint32_t noise(uint64_t key, int token) {
  return mix32(mix32((static_cast<uint32_t>(token) * 0x9E3779B9u) ^ static_cast<uint32_t>(key)) + static_cast<uint32_t>(key >> 32));
}

// ---------------------------------------------------------------- keys and masses, step by step as in top_k_top_p.py

__device__ __forceinline__ uint32_t falling_key(float value) {  // increases as the value decreases
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits >> 31) != 0 ? bits : 0x7fffffffu - bits;
}

__device__ __forceinline__ int mass_of(float depth) {
  const float y = fmaxf(-32.0f, __fmul_rn(depth, -1.44269504f));
  const float n = rintf(y);
  const float f = __fsub_rn(y, n);
  float p = 1.5403530e-4f;
  p = __fadd_rn(__fmul_rn(p, f), 1.3333558e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 9.6181291e-3f);
  p = __fadd_rn(__fmul_rn(p, f), 5.5504109e-2f);
  p = __fadd_rn(__fmul_rn(p, f), 2.4022651e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 6.9314718e-1f);
  p = __fadd_rn(__fmul_rn(p, f), 1.0f);
  const float scale = __uint_as_float(static_cast<uint32_t>(static_cast<int>(n) + 157) << 23);
  return static_cast<int>(__fadd_rn(__fmul_rn(p, scale), 0.5f));
}

// ---------------------------------------------------------------- CTA reductions

struct Shared {
  unsigned long long bins[kBins];
  double doubles[32];
  unsigned long long longs[32];
  float floats[32];
  int ints[32];
  uint32_t low;
  unsigned long long before;
  int tie;  // id of the first tie that is dropped
  float best_values[kMostLogprobs];
  int best_ids[kMostLogprobs];
  int num_best;
};

template <class T, class F>
__device__ __forceinline__ T reduce(T value, T* shared, F better) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = better(value, __shfl_xor_sync(0xffffffffu, value, step));
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = shared[lane];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = better(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// f(i, logit) for every token of a sequence as the model gave it: by 16-byte loads, kAhead of them in flight, if aligned and
// worthwhile. A thread's ids ascend.
template <int kAhead = 1, class Row, class F>
__device__ __forceinline__ void for_each(const Row& row, int vocab, F f) {
  using P = Pack<typename Row::Value>;
  int packs = 0;
  if constexpr (Row::kInPacks) {
    if (reinterpret_cast<uintptr_t>(row.logits) % 16 == 0) packs = vocab / P::size;
#pragma unroll kAhead
    for (int p = threadIdx.x; p < packs; p += kThreads) {
      const P pack = load_pack(row.logits + p * P::size);
#pragma unroll
      for (int j = 0; j < P::size; ++j) f(p * P::size + j, to_float(pack.v[j]));
    }
  }
  for (int i = packs * P::size + threadIdx.x; i < vocab; i += kThreads) f(i, to_float(row.logits[i]));
}

struct Cut {
  uint32_t key;  // tokens with a smaller key are kept,
  long long ties;  // and this many, in ascending id order, of those with it
};

// The shortest prefix by (key, id) whose masses reach `goal`, over the tokens for which keys(i, &key, &mass) returns true.
template <class Keys>
__device__ Cut find_cut(int vocab, unsigned long long goal, Shared& s, Keys keys) {
  uint32_t low = 0;
  int shift = 32;
  unsigned long long before = 0;
  while (shift > 0) {
    const int next = shift > kBinBits ? shift - kBinBits : 0, bins = 1 << (shift - next);
    for (int i = threadIdx.x; i < bins; i += kThreads) s.bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      uint32_t key;
      int m;
      if (!keys(i, &key, &m)) continue;
      const uint32_t away = key - low;
      if (shift < 32 && (away >> shift) != 0) continue;
      if (m > 0) atomicAdd(&s.bins[away >> next], static_cast<unsigned long long>(m));
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // one warp scans the bins; if the goal is not reached it ends with the last key
      const int each = bins / 32;
      unsigned long long own = 0;
      for (int i = 0; i < each; ++i) own += s.bins[threadIdx.x * each + i];
      unsigned long long upto = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, upto, step);
        if (threadIdx.x >= step) upto += other;
      }
      const unsigned reached = __ballot_sync(0xffffffffu, before + upto >= goal);
      const int lane = reached == 0 ? 31 : __ffs(reached) - 1;
      if (static_cast<int>(threadIdx.x) == lane) {
        unsigned long long sum = before + upto - own;
        int bin = lane * each;
        while (bin + 1 < (lane + 1) * each && sum + s.bins[bin] < goal) sum += s.bins[bin++];
        s.before = sum;
        s.low = static_cast<uint32_t>(bin);
      }
    }
    __syncthreads();
    low += s.low << next;
    before = s.before;
    shift = next;
    __syncthreads();
  }
  // All tokens of one key have the same mass.
  unsigned long long own_mass = 0;
  for (int i = threadIdx.x; i < vocab && own_mass == 0; i += kThreads) {
    uint32_t key;
    int m;
    if (keys(i, &key, &m) && key == low) own_mass = static_cast<unsigned long long>(m) + 1;
  }
  own_mass = reduce(own_mass, s.longs, [](unsigned long long a, unsigned long long b) { return a > b ? a : b; });
  const unsigned long long mass = own_mass > 0 ? own_mass - 1 : 0;
  if (mass < 1) return {low, static_cast<long long>(vocab)};
  const long long ties = static_cast<long long>((goal - before + mass - 1) / mass);
  return {low, ties < 1 ? 1 : ties};
}

// Id from which tokens with the cut's key are dropped: the (ties + 1)-th of them, or the vocabulary size.
template <class Keys>
__device__ int end_of_ties(int vocab, Cut cut, Shared& s, Keys keys) {
  if (cut.ties >= vocab) return vocab;
  long long seen = 0;
  for (int first = 0; first < vocab; first += kThreads) {
    const int i = first + threadIdx.x;
    uint32_t key = 0;
    int m;
    const bool is_tie = i < vocab && keys(i, &key, &m) && key == cut.key;
    const unsigned votes = __ballot_sync(0xffffffffu, is_tie);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) s.ints[warp] = __popc(votes);
    __syncthreads();
    int ahead = 0, all = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) ahead += s.ints[w];
      all += s.ints[w];
    }
    const long long rank = seen + ahead + __popc(votes & ((1u << lane) - 1u));
    if (is_tie && rank == cut.ties) s.tie = i;
    const bool is_found = seen + all > cut.ties;
    seen += all;
    __syncthreads();
    if (is_found) return s.tie;
  }
  return vocab;
}

// The k largest, ties by ascending id; all finite ones if fewer.
struct Top {
  uint32_t key;
  int end;
  __device__ __forceinline__ bool holds(int i, float x) const {
    const uint32_t mine = falling_key(x);
    return mine < key || (mine == key && i < end);
  }
};

template <class Row>
__device__ Top top_k(const Row& values, int vocab, int k, Shared& s) {
  auto keys = [&](int i, uint32_t* key, int* mass) {
    const float x = values(i);
    *key = falling_key(x);
    *mass = 1;
    return x > -INFINITY;
  };
  const Cut cut = find_cut(vocab, static_cast<unsigned long long>(k), s, keys);
  return {cut.key, end_of_ties(vocab, cut, s, keys)};
}

// ---------------------------------------------------------------- one sequence

constexpr int kNotFinite = -2, kNothingLeft = -3;

// Samples a token from logits values(i), or returns an error code; all threads get it.
template <class Row>
__device__ int draw(const Row& values, const SampleJob& job, int vocab, int position, Shared& s) {
  auto larger = [](float a, float b) { return fmaxf(a, b); };
  auto least = [](int a, int b) { return a < b ? a : b; };
  float best = -INFINITY, best_raw = -INFINITY;
  int found = 0x7fffffff;
  bool is_sound = true;
  for_each<4>(values, vocab, [&](int i, float raw) {
    const float x = values.ruled(i, raw);
    is_sound &= raw == raw && raw < INFINITY;
    best_raw = fmaxf(best_raw, raw);
    if (x > best) {
      best = x;
      found = i;
    }
  });
  is_sound = __syncthreads_and(is_sound) != 0 && __syncthreads_or(best_raw > -INFINITY) != 0;
  if (!is_sound) return kNotFinite;
  const float peak = reduce(best, s.floats, larger);
  if (!(peak > -INFINITY && peak < INFINITY)) return kNothingLeft;
  if (job.is_greedy) return reduce(best == peak ? found : 0x7fffffff, s.ints, least);
  // Cuts, each applied to what the previous one kept.
  const bool has_k = job.top_k > 0 && job.top_k < vocab;
  const Top top = has_k ? top_k(values, vocab, job.top_k, s) : Top{0xffffffffu, vocab};
  const float inverse = static_cast<float>(1.0 / job.temperature);
  uint32_t p_key = 0xffffffffu;
  int p_end = 0;
  const bool has_p = job.top_p < 1.0;
  if (has_p) {
    auto mass_at = [&](int i, float x, uint32_t* key, int* mass) {
      const float depth = __fmul_rn(__fsub_rn(peak, x), inverse);
      *key = __float_as_uint(depth);
      *mass = mass_of(depth);
      return !has_k || top.holds(i, x);
    };
    auto keys = [&](int i, uint32_t* key, int* mass) { return mass_at(i, values(i), key, mass); };
    unsigned long long total = 0;
    for_each(values, vocab, [&](int i, float raw) {
      uint32_t key;
      int m;
      if (mass_at(i, values.ruled(i, raw), &key, &m)) total += static_cast<unsigned long long>(m);
    });
    total = reduce(total, s.longs, [](unsigned long long a, unsigned long long b) { return a + b; });
    const Cut cut = find_cut(vocab, static_cast<unsigned long long>(ceil(job.top_p * static_cast<double>(total))), s, keys);
    p_key = cut.key;
    p_end = end_of_ties(vocab, cut, s, keys);
  }
  const float floor = static_cast<float>(static_cast<double>(peak) + job.min_depth);
  const bool has_floor = job.min_depth > -INFINITY;
  auto stays = [&](int i, float x) {
    if (!(x > -INFINITY) || (has_k && !top.holds(i, x)) || (has_floor && x < floor)) return false;
    if (!has_p) return true;
    const uint32_t key = __float_as_uint(__fmul_rn(__fsub_rn(peak, x), inverse));
    return key < p_key || (key == p_key && i < p_end);
  };
  // The Gumbel-max draw: a bound first, then the tokens within it in double.
  const uint64_t key = noise_key(job.seed, job.choice, position);
  float leader = INFINITY;
  uint32_t leader_noise = 0;
  for_each(values, vocab, [&](int i, float raw) {
    const float x = values.ruled(i, raw);
    if (!stays(i, x)) return;
    const uint32_t h = noise(key, i);
    const float ratio = (static_cast<float>(h) + 0.5f) * expf((peak - x) * inverse);
    if (ratio < leader) {
      leader = ratio;
      leader_noise = h;
    }
  });
  const double v = (static_cast<double>(leader_noise) + 0.5) * 0x1p-32;
  const float bound = leader == INFINITY ? INFINITY : static_cast<float>(leader * (-log1p(-v) / v) * kSlack);
  const float limit = reduce(bound, s.floats, [](float a, float b) { return fminf(a, b); });
  double ahead = -INFINITY;
  int winner = 0x7fffffff;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const float x = values(i);
    if (!stays(i, x)) continue;
    const uint32_t h = noise(key, i);
    if (!((static_cast<float>(h) + 0.5f) * expf((peak - x) * inverse) <= limit)) continue;
    const double u = (static_cast<double>(h) + 0.5) * 0x1p-32;
    const double score = (static_cast<double>(x) - peak) / job.temperature - log(-log1p(-u));
    if (score > ahead) {
      ahead = score;
      winner = i;
    }
  }
  const double highest = reduce(ahead, s.doubles, [](double a, double b) { return a > b ? a : b; });
  return reduce(ahead == highest ? winner : 0x7fffffff, s.ints, least);
}

// Log-probabilities of `token` and of the `count` - 1 most likely tokens under the sequence's own logits.
template <class T>
__device__ __noinline__ void write_logprobs(const T* logits, int vocab, int token, int count, Shared& s, Logprobs& out) {
  const PlainRow<T> values{logits};
  auto plus = [](auto a, auto b) { return a + b; };
  const float own = values(token);
  float best = -INFINITY;
  int above = 0;
  for_each(values, vocab, [&](int, float x) {
    best = fmaxf(best, x);
    above += x > own;
  });
  const float peak = reduce(best, s.floats, [](float a, float b) { return fmaxf(a, b); });
  above = reduce(above, s.ints, plus);
  double sum = 0.0;
  for_each(values, vocab, [&](int, float x) { sum += static_cast<double>(expf(x - peak)); });
  const double shift = log(reduce(sum, s.doubles, plus));
  auto value = [&](float x) { return static_cast<float>(static_cast<double>(x) - static_cast<double>(peak) - shift); };
  if (threadIdx.x == 0) {
    out.rank = 1 + above;
    out.ids[0] = token;
    out.values[0] = value(own);
    s.num_best = 0;
  }
  const int k = min(count, kMostLogprobs) - 1;
  if (k > 0) {
    const Top top = top_k(values, vocab, k, s);
    for_each(values, vocab, [&](int i, float x) {
      if (!(x > -INFINITY) || !top.holds(i, x)) return;
      const int at = atomicAdd(&s.num_best, 1);
      s.best_values[at] = x;
      s.best_ids[at] = i;
    });
  }
  __syncthreads();
  const int mine = threadIdx.x, found = s.num_best;
  if (mine >= kMostLogprobs - 1) return;
  if (mine >= found) {
    out.ids[1 + mine] = -1;
    out.values[1 + mine] = -INFINITY;
    return;
  }
  const float x = s.best_values[mine];
  const int id = s.best_ids[mine];
  int place = 1;
  for (int i = 0; i < found; ++i) place += s.best_values[i] > x || (s.best_values[i] == x && s.best_ids[i] < id);
  out.ids[place] = id;
  out.values[place] = value(x);
}

template <class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleArgs args) {
  __shared__ Shared s;
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x, vocab = args.vocab;
  const T* logits = static_cast<const T*>(args.logits) + row * args.logits_stride;
  const int slot = args.slots == nullptr ? row : args.slots[row];
  if (slot < 0) return;
  const SampleJob& job = args.jobs[slot];
  const int position = args.positions[row];
  const bool has_rules = job.record != nullptr;
  if (has_rules) mark_completing(job, vocab);
  const int token = has_rules ? draw(RuledRow<T>(logits, &job, vocab, position), job, vocab, position, s)
                              : draw(PlainRow<T>{logits}, job, vocab, position, s);
  if (args.logprobs != nullptr && token >= 0 && job.num_logprobs > 0) {
    write_logprobs(logits, vocab, token, job.num_logprobs, s, args.logprobs[row]);
  }
  if (threadIdx.x != 0) return;
  args.tokens[row] = token;
  if (has_rules && token >= 0) note_output(job, vocab, token);
}

}  // namespace

void sample_rows(const SampleArgs& args, Stream stream) {
  if (args.rows < 1) return;
  if (args.vocab < 1) throw std::invalid_argument("sample_rows needs a vocabulary");
  with_type(args.type, [&](auto zero) { launch(sample_kernel<decltype(zero)>, dim3(args.rows), dim3(kThreads), 0, stream, args); });
}

}  // namespace trireme::cuda
