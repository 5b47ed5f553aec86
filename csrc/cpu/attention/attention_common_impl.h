// Shared by the attention kernels of float and integer caches: the state of a task, the attention mask, the merge of parts, the
// output. Included by attention_floats_impl.h and attention_ints_impl.h. Scores are in powers of two throughout.
#pragma once

#include "cpu/elementwise/ops.h"
#include "cpu/simd16.h"

namespace trireme::TRIREME_VARIANT {

inline constexpr int kSubs = kTileTokens / kLanes;
inline constexpr float kNegInf = -__builtin_inff();
inline constexpr float kLog2e = 1.44269504f;

// Number of queries whose accumulators fit the registers together.
#if defined(__AVX512F__)
inline constexpr int kQueries = 8;
#elif defined(__AVX2__)
inline constexpr int kQueries = 6;
#else
inline constexpr int kQueries = 2;
#endif

// State of the queries of one task; the arrays are in scratch memory.
struct TaskState {
  int group;
  int kv_head;
  int num_heads;        // the arrays below hold each head's queries, one head after the other
  int num_queries;      // per head
  int dim;
  int dim_padded;       // padded to whole vectors
  float* q;             // [num_queries][dim], scaled; for integer caches [num_queries][dim_padded] int16
  float* q_unit;        // [num_queries], factor of integer scores
  float* scores;        // [num_queries][kTileTokens], later their weights
  float* alpha;         // [num_queries], this tile's factor for earlier sums
  float* part_out;      // [num_queries][dim_padded], and the next two: of the current part
  float* part_max;      // [num_queries]
  float* part_sum;      // [num_queries][16]
  float* total_out;     // [num_queries][dim_padded], and the next two: of the parts before
  float* total_max;     // [num_queries]
  float* total_sum;     // [num_queries]
  float* packed_keys;   // [kSubs][dim][16], or [kSubs][dim / 2][16][2] int16
  float* packed_values; // [kTileTokens][dim_padded], or [kTileTokens / 2][dim_padded][2] int16
  float* packed_units;  // [2][kTileTokens], of integer keys and values

  int all_queries() const { return num_heads * num_queries; }

  // The state of one head.
  TaskState of_head(int index) const {
    TaskState head = *this;
    const int64_t first = static_cast<int64_t>(index) * num_queries;
    head.kv_head += index;
    head.num_heads = 1;
    head.q += first * dim_padded;
    head.q_unit += first;
    head.part_out += first * dim_padded;
    head.part_max += first;
    head.part_sum += first * kLanes;
    return head;
  }
};

static TaskState lay_out_scratch(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  TaskState s;
  s.group = a.q_heads / a.kv.heads;
  s.kv_head = task.kv_head;
  s.num_heads = task.num_heads;
  s.num_queries = task.num_tokens * s.group;
  s.dim = a.kv.dim;
  s.dim_padded = (a.kv.dim + kLanes - 1) / kLanes * kLanes;
  const int64_t n = s.all_queries(), padded = s.dim_padded;
  const int64_t n16 = (n + kLanes - 1) / kLanes * kLanes;
  auto take = [&](int64_t count) {
    float* start = scratch;
    scratch += count;
    return start;
  };
  s.part_out = take(n * padded);
  s.part_sum = take(n * kLanes);
  s.part_max = take(n16);
  s.total_out = take(n * padded);
  s.total_max = take(n16);
  s.total_sum = take(n16);
  s.q = take(n * padded);
  s.scores = take(n * kTileTokens);
  s.alpha = take(n16);
  s.q_unit = take(n16);
  s.packed_keys = take(padded * kTileTokens);
  s.packed_values = take(kTileTokens * padded);
  s.packed_units = take(2 * kTileTokens);
  return s;
}

// ---------------------------------------------------------------- mask

struct Range {
  int first, last;  // tokens within the tile
  int first_sub() const { return first / kLanes; }
  int last_sub() const { return (last + kLanes - 1) / kLanes; }
};

TRIREME_INLINE int larger(int a, int b) { return a > b ? a : b; }
TRIREME_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// First token that the query at `position` may attend to.
TRIREME_INLINE int first_seen(int position, int window) {
  return window > 0 ? larger(0, position - window + 1) : 0;
}

// What is read after a tile, to prefetch: tokens of one head's cache from `start` to `last`, none if last < start.
template <class Cache>
struct Upcoming {
  const Cache* cache;
  int start, last;

  bool has(int sub) const { return start + sub * kLanes <= last; }
  int token(int sub) const { return start + sub * kLanes; }
};

// Calls f(state of a head, its cache, first token of a tile, tokens of the tile within the mask, what is read next) for each
// tile of a part, and within a tile for each head of the task.
template <class Cache, class F>
TRIREME_INLINE void each_tile(const AttentionArgs& a, const AttentionTask& task, const TaskState& task_state, int part, F f) {
  const int num_heads = task_state.num_heads;
  const int last_position = task.first_position + task.num_tokens - 1;
  const int begin = larger(part * kPartTokens, first_seen(task.first_position, a.window));
  const int end = smaller((part + 1) * kPartTokens, last_position + 1);
  for (int tile_start = begin / kTileTokens * kTileTokens; tile_start < end; tile_start += kTileTokens) {
    const Range available = {larger(0, begin - tile_start), smaller(kTileTokens, end - tile_start)};
    for (int head = 0; head < num_heads; ++head) {
      const TaskState s = task_state.of_head(head);
      const bool is_last = head + 1 == num_heads;
      const Cache cache(a, task, s.kv_head), next(a, task, is_last ? task.kv_head : s.kv_head + 1);
      const int start = tile_start + (is_last ? kTileTokens : 0);
      f(s, cache, tile_start, available, Upcoming<Cache>{&next, start, is_last ? last_position : end - 1});
    }
  }
}

// The lanes of `sub` within the mask.
struct SeenLanes {
  int first, last;
  SeenLanes(Range seen, int sub)
      : first(larger(0, smaller(kLanes, seen.first - sub * kLanes))),
        last(larger(first, smaller(kLanes, seen.last - sub * kLanes))) {}
  bool all() const { return first == 0 && last == kLanes; }
};

// Tokens of the tile that at least one query of [query, query + count) sees.
TRIREME_INLINE Range covered_range(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                                   int count, int tile_start, Range available) {
  const int first_position = task.first_position + query / s.group;
  const int last_position = task.first_position + (query + count - 1) / s.group;
  return {larger(available.first, first_seen(first_position, a.window) - tile_start),
          smaller(available.last, last_position + 1 - tile_start)};
}

// ---------------------------------------------------------------- scores and merging parts

// log2(e) * cap * tanh(x / cap), where tanh(y) = 1 - 2 / (exp(2 y) + 1).
template <int R>
static void cap_scores(float cap, int first_sub, int last_sub, float* scores) {
  const Vec twice = set1(2.0f / cap), one = set1(1.0f), two = set1(2.0f), width = set1(cap * kLog2e);
  for (int r = 0; r < R; ++r) {
    for (int i = first_sub * kLanes; i < last_sub * kLanes; i += kLanes) {
      float* at = scores + r * kTileTokens + i;
      const Vec grown = exp(mul(load(at), twice));
      store(at, mul(width, ::trireme::TRIREME_VARIANT::sub(one, div(two, add(grown, one)))));
    }
  }
}

TRIREME_INLINE void copy_lanes(const float* from, float* to, int n) {
  for (int i = 0; i < n; i += kLanes) store(to + i, load(from + i));
}

// Merges one part's softmax state into the total. A sum of zero means that no token was seen.
TRIREME_INLINE void fold_part(const float* out, float part_max, float part_sum, float* total_out, float* total_max,
                              float* total_sum, int dim_padded) {
  if (part_sum == 0.0f) return;
  if (*total_sum == 0.0f) {
    copy_lanes(out, total_out, dim_padded);
    *total_max = part_max;
    *total_sum = part_sum;
    return;
  }
  const float after = *total_max > part_max ? *total_max : part_max;
  const float old_scale = exp2_scalar(*total_max - after), new_scale = exp2_scalar(part_max - after);
  for (int d = 0; d < dim_padded; d += kLanes) {
    store(total_out + d, fma(load(out + d), set1(new_scale), mul(load(total_out + d), set1(old_scale))));
  }
  const float old_sum = *total_sum * old_scale;
  *total_sum = old_sum + part_sum * new_scale;
  *total_max = after;
}

TRIREME_INLINE void start_part(const TaskState& s) {
  for (int64_t i = 0; i < static_cast<int64_t>(s.all_queries()) * s.dim_padded; i += kLanes) store(s.part_out + i, zero());
  for (int i = 0; i < s.all_queries(); ++i) {
    store(s.part_sum + static_cast<int64_t>(i) * kLanes, zero());
    s.part_max[i] = kNegInf;
  }
}

TRIREME_INLINE void write_out(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                              const float* values, float sum) {
  const int of_head = query % s.num_queries;
  const int token = task.first_token + of_head / s.group;
  const int head = (s.kv_head + query / s.num_queries) * s.group + of_head % s.group;
  float* out = a.out + token * a.out_stride + static_cast<int64_t>(head) * s.dim;
  // If all weights are zero, `values` was never written.
  const Vec inverse = set1(sum != 0.0f ? 1.0f / sum : __builtin_nanf(""));
  int d = 0;
  for (; d + kLanes <= s.dim; d += kLanes) store(out + d, mul(load(values + d), inverse));
  if (d < s.dim) store_first(out + d, mul(load(values + d), inverse), s.dim - d);
}

}  // namespace trireme::TRIREME_VARIANT
