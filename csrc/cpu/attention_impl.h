// Paged attention kernel for one instruction set. Included by ops_*.cpp.
//
// One task is some queries of one row that share a KV head (tokens times the query heads of that head). Keys are stored
// with tokens in the lanes, values with dims in the lanes, so both products are broadcast-and-FMA without sums across lanes:
//
//     scores[r][16 tokens] = sum over d of q[r][d] * k[d][16 tokens]        out[r][16 dims] += sum over j of p[r][j] * v[j][16 dims]
//
// Each accumulator lane belongs to one query and runs over d (or j) in order, so grouping queries changes no bit: tokens
// that a query does not see get weight zero, which adds exactly nothing. Online softmax: Milakov and Gimelshein 2018.
#pragma once

#include "ops.h"
#include "simd16.h"

namespace trireme::TRIREME_VARIANT {

inline constexpr int kSubs = kTileTokens / kLanes;
inline constexpr float kNegInf = -__builtin_inff();

// Queries whose accumulators fit the registers together.
#if defined(__AVX512F__)
inline constexpr int kQueries = 8;
#elif defined(__AVX2__)
inline constexpr int kQueries = 6;
#else
inline constexpr int kQueries = 2;
#endif

// Columns of 16 lanes per query, to keep about twelve accumulator registers busy.
constexpr int num_columns(int queries) {
#if defined(__AVX512F__)
  return queries <= 3 ? 4 : 2;
#elif defined(__AVX2__)
  return queries == 1 ? 4 : queries <= 3 ? 2 : 1;
#else
  return queries == 1 ? 2 : 1;
#endif
}

// Where the keys and values of one tile are: a pointer per 16 tokens, strides in elements. `ahead` are those of the next
// tile, to be fetched meanwhile, a line per step: blocks are scattered, which the hardware does not foresee.
template <class T>
struct Tile {
  const T* keys[kSubs];    // [dim][16]
  const T* values[kSubs];  // [16][dim]
  const T* ahead_keys[kSubs];
  const T* ahead_values[kSubs];
  int64_t key_stride;
  int64_t value_stride;
};

// State of the queries of one task; the arrays lie in the scratch.
struct TaskState {
  int group;
  int num_queries;
  int dim;
  int dim_padded;
  float* q;             // [num_queries][dim], scaled
  float* scores;        // [num_queries][kTileTokens], then their weights
  float* alpha;         // [num_queries], what this tile multiplies earlier sums by
  float* part_out;      // [num_queries][dim_padded], and the next two: of the part under way
  float* part_max;      // [num_queries]
  float* part_sum;      // [num_queries][16]
  float* total_out;     // [num_queries][dim_padded], and the next two: of the parts before it
  float* total_max;     // [num_queries]
  float* total_sum;     // [num_queries]
  float* packed_keys;   // [kSubs][dim][16]
  float* packed_values; // [kTileTokens][dim_padded]
};

static TaskState lay_out_scratch(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  TaskState s;
  s.group = a.q_heads / a.kv.heads;
  s.num_queries = task.num_tokens * s.group;
  s.dim = a.kv.dim;
  s.dim_padded = (a.kv.dim + kLanes - 1) / kLanes * kLanes;
  const int64_t n = s.num_queries, padded = s.dim_padded;
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
  s.packed_keys = take(static_cast<int64_t>(s.dim) * kTileTokens);
  s.packed_values = take(kTileTokens * padded);
  return s;
}

// ---------------------------------------------------------------- register tiles

template <int R, int N, class T>
TRIREME_INLINE void score_columns(const float* q, int dim, const Tile<T>& tile, int sub, float* scores) {
  const int64_t key_stride = tile.key_stride;
  const T *keys[N], *ahead[N];
  for (int n = 0; n < N; ++n) {
    keys[n] = tile.keys[sub + n];
    ahead[n] = tile.ahead_keys[sub + n];
  }
  Vec sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) sums[r][n] = zero();
  }
  for (int d = 0; d < dim; ++d) {
    Vec key[N];
    for (int n = 0; n < N; ++n) {
      key[n] = load(keys[n] + d * key_stride);
      __builtin_prefetch(ahead[n] + d * key_stride, 0, 2);
    }
    for (int r = 0; r < R; ++r) {
      const Vec value = set1(q[static_cast<int64_t>(r) * dim + d]);
      for (int n = 0; n < N; ++n) sums[r][n] = fma(value, key[n], sums[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) store(scores + r * kTileTokens + n * kLanes, sums[r][n]);
  }
}

template <int R, class T>
static void score_tile(const TaskState& s, int query, const Tile<T>& tile, int first_sub, int last_sub, float* scores) {
  constexpr int N = num_columns(R);
  const float* q = s.q + static_cast<int64_t>(query) * s.dim;
  int sub = first_sub;
  for (; sub + N <= last_sub; sub += N) {
    score_columns<R, N>(q, s.dim, tile, sub, scores + sub * kLanes);
  }
  for (; sub < last_sub; ++sub) score_columns<R, 1>(q, s.dim, tile, sub, scores + sub * kLanes);
}

template <int R, int N, class T>
TRIREME_INLINE void add_columns(const float* weights, const float* alpha, const Tile<T>& tile, int column, int first,
                                int last, float* out, int out_stride) {
  Vec sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      sums[r][n] = mul(load(out + static_cast<int64_t>(r) * out_stride + n * kLanes), set1(alpha[r]));
    }
  }
  for (int j = first; j < last;) {
    const int sub = j / kLanes;
    const int stop = last < (sub + 1) * kLanes ? last : (sub + 1) * kLanes;
    const int64_t offset = (j - sub * kLanes) * tile.value_stride + column;
    const T *row = tile.values[sub] + offset, *ahead = tile.ahead_values[sub] + offset;
    for (; j < stop; ++j, row += tile.value_stride, ahead += tile.value_stride) {
      Vec value[N];
      for (int n = 0; n < N; ++n) value[n] = load(row + n * kLanes);
      __builtin_prefetch(ahead, 0, 2);
      for (int r = 0; r < R; ++r) {
        const Vec weight = set1(weights[r * kTileTokens + j]);
        for (int n = 0; n < N; ++n) sums[r][n] = fma(weight, value[n], sums[r][n]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) store(out + static_cast<int64_t>(r) * out_stride + n * kLanes, sums[r][n]);
  }
}

template <int R, class T>
static void add_tile(const TaskState& s, int query, const Tile<T>& tile, const float* weights, const float* alpha,
                     int first, int last) {
  constexpr int N = num_columns(R);
  float* out = s.part_out + static_cast<int64_t>(query) * s.dim_padded;
  int column = 0;
  for (; column + N * kLanes <= s.dim_padded; column += N * kLanes) {
    add_columns<R, N>(weights, alpha, tile, column, first, last, out + column, s.dim_padded);
  }
  for (; column < s.dim_padded; column += kLanes) {
    add_columns<R, 1>(weights, alpha, tile, column, first, last, out + column, s.dim_padded);
  }
}

// cap * tanh(x / cap), where tanh(y) = 1 - 2 / (exp(2 y) + 1).
template <int R>
static void cap_scores(float cap, int first_sub, int last_sub, float* scores) {
  const Vec twice = set1(2.0f / cap), one = set1(1.0f), two = set1(2.0f), width = set1(cap);
  for (int r = 0; r < R; ++r) {
    for (int i = first_sub * kLanes; i < last_sub * kLanes; i += kLanes) {
      float* at = scores + r * kTileTokens + i;
      const Vec grown = exp(mul(load(at), twice));
      store(at, mul(width, ::trireme::TRIREME_VARIANT::sub(one, div(two, add(grown, one)))));
    }
  }
}

// ---------------------------------------------------------------- softmax over one tile

struct Range {
  int first, last;  // tokens within the tile
  int first_sub() const { return first / kLanes; }
  int last_sub() const { return (last + kLanes - 1) / kLanes; }
};

TRIREME_INLINE int larger(int a, int b) { return a > b ? a : b; }
TRIREME_INLINE int smaller(int a, int b) { return a < b ? a : b; }

// First token that the query at `position` sees.
TRIREME_INLINE int first_seen(int position, int window) {
  return window > 0 ? larger(0, position - window + 1) : 0;
}

TRIREME_INLINE void clear_weights(float* scores, Range covered) {
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) store(scores + sub * kLanes, zero());
}

// Turns the scores of one query into weights, in place; `seen` are its tokens among the `covered` ones. Returns the factor
// for what was summed before.
TRIREME_INLINE float weigh_query(float* scores, Range covered, Range seen, float* max_so_far, float* sum_lanes) {
  if (seen.first >= seen.last) {
    clear_weights(scores, covered);
    return 1.0f;
  }
  Vec best = set1(kNegInf);
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    const int first = larger(0, smaller(kLanes, seen.first - sub * kLanes));
    const int last = larger(first, smaller(kLanes, seen.last - sub * kLanes));
    Vec score = load(scores + sub * kLanes);
    if (first > 0 || last < kLanes) {
      score = keep_lanes(score, first, last, set1(kNegInf));
      store(scores + sub * kLanes, score);
    }
    best = max(best, score);
  }
  const float tile_max = reduce_max(best);
  const float before = *max_so_far;
  const float after = before > tile_max ? before : tile_max;
  if (after == kNegInf) {
    clear_weights(scores, covered);
    return 1.0f;
  }
  const float alpha = before == after ? 1.0f : exp_scalar(before - after);
  const Vec shift = set1(after);
  Vec sum = mul(load(sum_lanes), set1(alpha));
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    const Vec weight = exp(::trireme::TRIREME_VARIANT::sub(load(scores + sub * kLanes), shift));
    sum = add(sum, weight);
    store(scores + sub * kLanes, weight);
  }
  store(sum_lanes, sum);
  *max_so_far = after;
  return alpha;
}

// Tokens of the tile that some query of [query, query + count) sees.
TRIREME_INLINE Range covered_range(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                                   int count, int tile_start, Range available) {
  const int first_position = task.first_position + query / s.group;
  const int last_position = task.first_position + (query + count - 1) / s.group;
  return {larger(available.first, first_seen(first_position, a.window) - tile_start),
          smaller(available.last, last_position + 1 - tile_start)};
}

template <int R, class T>
static void weigh_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                          const Tile<T>& tile, int tile_start, Range available) {
  const Range covered = covered_range(a, task, s, query, R, tile_start, available);
  if (covered.first >= covered.last) return;
  float* scores = s.scores + static_cast<int64_t>(query) * kTileTokens;
  score_tile<R, T>(s, query, tile, covered.first_sub(), covered.last_sub(), scores);
  if (a.softcap > 0.0f) cap_scores<R>(a.softcap, covered.first_sub(), covered.last_sub(), scores);
  for (int r = 0; r < R; ++r) {
    const Range seen = covered_range(a, task, s, query + r, 1, tile_start, covered);
    s.alpha[query + r] = weigh_query(scores + r * kTileTokens, covered, seen, s.part_max + query + r,
                                     s.part_sum + static_cast<int64_t>(query + r) * kLanes);
  }
}

template <int R, class T>
static void add_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                        const Tile<T>& tile, int tile_start, Range available) {
  const Range covered = covered_range(a, task, s, query, R, tile_start, available);
  if (covered.first >= covered.last) return;
  add_tile<R, T>(s, query, tile, s.scores + static_cast<int64_t>(query) * kTileTokens, s.alpha + query, covered.first,
                 covered.last);
}

enum class Pass { weigh, add };

template <Pass P, class T, int R = kQueries>
TRIREME_INLINE void dispatch_queries(int count, const AttentionArgs& a, const AttentionTask& task, const TaskState& s,
                                     int query, const Tile<T>& tile, int tile_start, Range available) {
  if constexpr (R > 0) {
    if (count != R) return dispatch_queries<P, T, R - 1>(count, a, task, s, query, tile, tile_start, available);
    if constexpr (P == Pass::weigh) weigh_queries<R, T>(a, task, s, query, tile, tile_start, available);
    if constexpr (P == Pass::add) add_queries<R, T>(a, task, s, query, tile, tile_start, available);
  }
}

template <Pass P, class T>
static void pass_over_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s,
                              const Tile<T>& tile, int tile_start, Range available) {
  // Groups of nearly equal size: 7 queries are 4 + 3, not 6 + 1.
  const int num_groups = (s.num_queries + kQueries - 1) / kQueries;
  int query = 0;
  for (int i = 0; i < num_groups; ++i) {
    const int count = (s.num_queries - query + num_groups - i - 1) / (num_groups - i);
    dispatch_queries<P, T>(count, a, task, s, query, tile, tile_start, available);
    query += count;
  }
}

// All queries against the keys, then all against the values: each half of the tile stays in the first cache meanwhile.
template <class T>
static void attend_tile(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, const Tile<T>& tile,
                        int tile_start, Range available) {
  pass_over_queries<Pass::weigh>(a, task, s, tile, tile_start, available);
  pass_over_queries<Pass::add>(a, task, s, tile, tile_start, available);
}

// ---------------------------------------------------------------- finding and packing the tiles

template <class T>
struct HeadCache {
  const T* k;
  const T* v;
  const int32_t* table;
  int64_t block_stride;
  int block_size;
  int dim;

  HeadCache(const AttentionArgs& a, const AttentionTask& task)
      : table(a.block_table + task.row * a.table_stride), block_size(a.kv.block_size), dim(a.kv.dim) {
    const int64_t head_size = static_cast<int64_t>(dim) * block_size;
    block_stride = head_size * a.kv.heads;
    k = static_cast<const T*>(a.kv.k) + task.kv_head * head_size;
    v = static_cast<const T*>(a.kv.v) + task.kv_head * head_size;
  }
  const T* key(int token) const { return k + table[token / block_size] * block_stride + token % block_size; }
  const T* value(int token) const {
    return v + table[token / block_size] * block_stride + static_cast<int64_t>(token % block_size) * dim;
  }
};

template <class T>
TRIREME_INLINE Tile<T> direct_tile(const HeadCache<T>& cache, int tile_start, Range available, int last_position) {
  Tile<T> tile;
  tile.key_stride = cache.block_size;
  tile.value_stride = cache.dim;
  for (int sub = 0; sub < kSubs; ++sub) {
    const bool used = sub >= available.first_sub() && sub < available.last_sub();
    const int token = tile_start + sub * kLanes;
    tile.keys[sub] = used ? cache.key(token) : nullptr;
    tile.values[sub] = used ? cache.value(token) : nullptr;
    const bool has_next = token + kTileTokens <= last_position;
    tile.ahead_keys[sub] = has_next ? cache.key(token + kTileTokens) : tile.keys[sub];
    tile.ahead_values[sub] = has_next ? cache.value(token + kTileTokens) : tile.values[sub];
  }
  return tile;
}

// Keys of 16 tokens as [dim][16] float32; tokens outside `available` become zero.
template <class T>
TRIREME_INLINE void pack_keys(const HeadCache<T>& cache, int tile_start, int sub, Range available, float* out) {
  const int start = sub * kLanes;
  if (cache.block_size % kLanes == 0) {
    const T* keys = cache.key(tile_start + start);
    for (int d = 0; d < cache.dim; ++d) store(out + d * kLanes, load(keys + static_cast<int64_t>(d) * cache.block_size));
    return;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int token = start + lane;
    if (token < available.first || token >= available.last) {
      for (int d = 0; d < cache.dim; ++d) out[d * kLanes + lane] = 0.0f;
      continue;
    }
    const T* key = cache.key(tile_start + token);
    for (int d = 0; d < cache.dim; ++d) out[d * kLanes + lane] = widen(key[static_cast<int64_t>(d) * cache.block_size]);
  }
}

template <class T>
TRIREME_INLINE void pack_value(const HeadCache<T>& cache, int token, float* out, int dim_padded) {
  const T* value = cache.value(token);
  int d = 0;
  for (; d + kLanes <= cache.dim; d += kLanes) store(out + d, load(value + d));
  for (; d < cache.dim; ++d) out[d] = widen(value[d]);
  for (; d < dim_padded; ++d) out[d] = 0.0f;
}

template <class T>
static Tile<float> packed_tile(const HeadCache<T>& cache, const TaskState& s, int tile_start, Range available) {
  Tile<float> tile;
  tile.key_stride = kLanes;
  tile.value_stride = s.dim_padded;
  for (int sub = 0; sub < kSubs; ++sub) {
    float* keys = s.packed_keys + static_cast<int64_t>(sub) * s.dim * kLanes;
    tile.keys[sub] = keys;
    tile.values[sub] = s.packed_values + static_cast<int64_t>(sub) * kLanes * s.dim_padded;
    tile.ahead_keys[sub] = tile.keys[sub];
    tile.ahead_values[sub] = tile.values[sub];
    if (sub >= available.first_sub() && sub < available.last_sub()) pack_keys(cache, tile_start, sub, available, keys);
  }
  for (int token = available.first; token < available.last; ++token) {
    pack_value(cache, tile_start + token, s.packed_values + static_cast<int64_t>(token) * s.dim_padded, s.dim_padded);
  }
  return tile;
}

// ---------------------------------------------------------------- parts and tasks

TRIREME_INLINE void copy_lanes(const float* from, float* to, int n) {
  for (int i = 0; i < n; i += kLanes) store(to + i, load(from + i));
}

// Adds one part's softmax state to what came before. A sum of zero means that no token was seen.
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
  const float old_scale = exp_scalar(*total_max - after), new_scale = exp_scalar(part_max - after);
  for (int d = 0; d < dim_padded; d += kLanes) {
    store(total_out + d, fma(load(out + d), set1(new_scale), mul(load(total_out + d), set1(old_scale))));
  }
  const float old_sum = *total_sum * old_scale;
  *total_sum = old_sum + part_sum * new_scale;
  *total_max = after;
}

TRIREME_INLINE void start_part(const TaskState& s) {
  for (int64_t i = 0; i < static_cast<int64_t>(s.num_queries) * s.dim_padded; i += kLanes) store(s.part_out + i, zero());
  for (int i = 0; i < s.num_queries; ++i) {
    store(s.part_sum + static_cast<int64_t>(i) * kLanes, zero());
    s.part_max[i] = kNegInf;
  }
}

template <class T>
static void attend_part(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int part) {
  const HeadCache<T> cache(a, task);
  const int last_position = task.first_position + task.num_tokens - 1;
  const int begin = larger(part * kPartTokens, first_seen(task.first_position, a.window));
  const int end = smaller((part + 1) * kPartTokens, last_position + 1);
  const bool is_aligned = a.kv.block_size % kLanes == 0 && a.kv.dim % kLanes == 0;
  const bool is_direct = is_aligned && s.num_queries <= 2 * kQueries;
  start_part(s);
  for (int tile_start = begin / kTileTokens * kTileTokens; tile_start < end; tile_start += kTileTokens) {
    const Range available = {larger(0, begin - tile_start), smaller(kTileTokens, end - tile_start)};
    if (is_direct) {
      attend_tile(a, task, s, direct_tile(cache, tile_start, available, last_position), tile_start, available);
    } else {
      attend_tile(a, task, s, packed_tile(cache, s, tile_start, available), tile_start, available);
    }
  }
}

TRIREME_INLINE void write_out(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                              const float* values, float sum) {
  const int token = task.first_token + query / s.group;
  const int head = task.kv_head * s.group + query % s.group;
  float* out = a.out + token * a.out_stride + static_cast<int64_t>(head) * s.dim;
  const Vec inverse = set1(1.0f / sum);
  int d = 0;
  for (; d + kLanes <= s.dim; d += kLanes) store(out + d, mul(load(values + d), inverse));
  if (d < s.dim) store_first(out + d, mul(load(values + d), inverse), s.dim - d);
}

static void scale_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s) {
  for (int query = 0; query < s.num_queries; ++query) {
    const int token = task.first_token + query / s.group;
    const int head = task.kv_head * s.group + query % s.group;
    const float* from = a.q + token * a.q_stride + static_cast<int64_t>(head) * s.dim;
    float* to = s.q + static_cast<int64_t>(query) * s.dim;
    for (int d = 0; d < s.dim; ++d) to[d] = from[d] * a.scale;
  }
}

template <class T>
static void attend_typed(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const TaskState s = lay_out_scratch(a, task, scratch);
  scale_queries(a, task, s);
  if (task.part >= 0) {
    attend_part<T>(a, task, s, task.part);
    for (int query = 0; query < s.num_queries; ++query) {
      float* record = task.partial + query * partial_stride(s.dim);
      copy_lanes(s.part_out + static_cast<int64_t>(query) * s.dim_padded, record, s.dim_padded);
      record[s.dim_padded] = s.part_max[query];
      record[s.dim_padded + 1] = reduce_add(load(s.part_sum + static_cast<int64_t>(query) * kLanes));
    }
    return;
  }
  for (int query = 0; query < s.num_queries; ++query) s.total_sum[query] = 0.0f;
  const int last_part = (task.first_position + task.num_tokens - 1) / kPartTokens;
  for (int part = first_seen(task.first_position, a.window) / kPartTokens; part <= last_part; ++part) {
    attend_part<T>(a, task, s, part);
    for (int query = 0; query < s.num_queries; ++query) {
      const int64_t at = static_cast<int64_t>(query) * s.dim_padded;
      const float sum = reduce_add(load(s.part_sum + static_cast<int64_t>(query) * kLanes));
      fold_part(s.part_out + at, s.part_max[query], sum, s.total_out + at, s.total_max + query, s.total_sum + query,
                s.dim_padded);
    }
  }
  for (int query = 0; query < s.num_queries; ++query) {
    write_out(a, task, s, query, s.total_out + static_cast<int64_t>(query) * s.dim_padded, s.total_sum[query]);
  }
}

static void attend(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  switch (a.kv.type) {
    case KvType::f32: return attend_typed<float>(a, task, scratch);
    case KvType::f16: return attend_typed<Half>(a, task, scratch);
    case KvType::bf16: return attend_typed<BFloat>(a, task, scratch);
  }
}

static void fold_parts(const AttentionArgs& a, const AttentionTask& task, int num_parts, int64_t part_stride,
                       float* scratch) {
  const TaskState s = lay_out_scratch(a, task, scratch);
  for (int query = 0; query < s.num_queries; ++query) {
    float total_max = 0.0f, total_sum = 0.0f;
    for (int part = 0; part < num_parts; ++part) {
      const float* record = task.partial + part * part_stride + query * partial_stride(s.dim);
      fold_part(record, record[s.dim_padded], record[s.dim_padded + 1], s.total_out, &total_max, &total_sum,
                s.dim_padded);
    }
    write_out(a, task, s, query, s.total_out, total_sum);
  }
}

}  // namespace trireme::TRIREME_VARIANT
