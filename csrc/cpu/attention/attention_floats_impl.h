// Attention over caches of floats, for one instruction set. Included by attention_impl.h.
//
// Keys are stored with tokens in the lanes, values with dims in the lanes, so both GEMMs are broadcast-and-FMA without
// horizontal sums:
//
//     scores[r][16 tokens] = sum over d of q[r][d] * k[d][16 tokens]        out[r][16 dims] += sum over j of p[r][j] * v[j][16 dims]
//
// Each accumulator lane belongs to one query and runs over d (or j) in order, so grouping queries changes no bit: tokens
// outside a query's mask get weight zero, which adds exactly nothing. Online softmax: Milakov and Gimelshein 2018.
#pragma once

#include "cpu/attention/attention_common_impl.h"

namespace trireme::TRIREME_VARIANT {

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

// Locations of the keys and values of one tile: a pointer per 16 tokens, strides in elements. `ahead` is the next tile, of which
// one cache line is prefetched per step: blocks are scattered, which hardware prefetchers do not predict. A packed tile has
// been copied to scratch and has none.
template <class T, bool Packed>
struct Tile {
  static constexpr bool is_packed = Packed;
  const T* keys[kSubs];    // [dim][16]
  const T* values[kSubs];  // [16][dim]
  const T* ahead_keys[kSubs];
  const T* ahead_values[kSubs];
  int64_t key_stride;
  int64_t value_stride;
};

// ---------------------------------------------------------------- register tiles

template <int R, int N, class T, bool P>
TRIREME_INLINE void score_columns(const float* q, int dim, const Tile<T, P>& tile, int sub, float* scores) {
  const int64_t key_stride = tile.key_stride;
  const T *keys[N], *ahead[P ? 1 : N];
  for (int n = 0; n < N; ++n) {
    keys[n] = tile.keys[sub + n];
    if constexpr (!P) ahead[n] = tile.ahead_keys[sub + n];
  }
  Vec sums[R][N];
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) sums[r][n] = zero();
  }
  for (int d = 0; d < dim; ++d) {
    Vec key[N];
    for (int n = 0; n < N; ++n) {
      key[n] = load(keys[n] + d * key_stride);
      if constexpr (!P) __builtin_prefetch(ahead[n] + d * key_stride, 0, 2);
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

template <int R, class T, bool P>
static void score_tile(const TaskState& s, int query, const Tile<T, P>& tile, int first_sub, int last_sub, float* scores) {
  constexpr int N = num_columns(R);
  const float* q = s.q + static_cast<int64_t>(query) * s.dim;
  int sub = first_sub;
  for (; sub + N <= last_sub; sub += N) {
    score_columns<R, N>(q, s.dim, tile, sub, scores + sub * kLanes);
  }
  for (; sub < last_sub; ++sub) score_columns<R, 1>(q, s.dim, tile, sub, scores + sub * kLanes);
}

template <int R, int N, class T, bool P>
TRIREME_INLINE void add_columns(const float* weights, const float* alpha, const Tile<T, P>& tile, int column, int first,
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
    const T* row = tile.values[sub] + offset;
    for (; j < stop; ++j, row += tile.value_stride) {
      Vec value[N];
      for (int n = 0; n < N; ++n) value[n] = load(row + n * kLanes);
      if constexpr (!P) __builtin_prefetch(row + (tile.ahead_values[sub] - tile.values[sub]), 0, 2);
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

template <int R, class T, bool P>
static void add_tile(const TaskState& s, int query, const Tile<T, P>& tile, const float* weights, const float* alpha,
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

// ---------------------------------------------------------------- softmax over one tile

TRIREME_INLINE void clear_weights(float* scores, Range covered) {
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) store(scores + sub * kLanes, zero());
}

TRIREME_INLINE float sum_of_seen(const float* scores, Range covered, Range seen) {
  Vec sum = zero();
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    const SeenLanes lanes(seen, sub);
    sum = add(sum, keep_lanes(load(scores + sub * kLanes), lanes.first, lanes.last, zero()));
  }
  return reduce_add(sum);
}

// Converts the scores of one query into weights, in place; `seen` are its tokens among the `covered` ones. Returns the factor
// for earlier sums.
TRIREME_INLINE float weigh_query(float* scores, Range covered, Range seen, float* max_so_far, float* sum_lanes) {
  if (seen.first >= seen.last) {
    clear_weights(scores, covered);
    return 1.0f;
  }
  Vec best = set1(kNegInf);
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    const SeenLanes lanes(seen, sub);
    Vec score = load(scores + sub * kLanes);
    if (!lanes.all()) score = keep_lanes(score, lanes.first, lanes.last, set1(kNegInf));
    best = max(best, score);
  }
  const float tile_max = reduce_max(best);
  const float before = *max_so_far;
  float after = before > tile_max ? before : tile_max;
  if (after == kNegInf) {
    after = sum_of_seen(scores, covered, seen);  // picks up a NaN that the maximum dropped
    if (after == kNegInf) {
      clear_weights(scores, covered);
      return 1.0f;
    }
  }
  const float alpha = before == after ? 1.0f : exp2_scalar(before - after);
  const Vec shift = set1(after);
  Vec sum = mul(load(sum_lanes), set1(alpha));
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    const SeenLanes lanes(seen, sub);
    Vec weight = exp2(::trireme::TRIREME_VARIANT::sub(load(scores + sub * kLanes), shift));
    if (!lanes.all()) weight = keep_lanes(weight, lanes.first, lanes.last, zero());
    sum = add(sum, weight);
    store(scores + sub * kLanes, weight);
  }
  store(sum_lanes, sum);
  *max_so_far = after;
  return alpha;
}

template <int R, class T, bool P>
static void weigh_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                          const Tile<T, P>& tile, int tile_start, Range available) {
  const Range covered = covered_range(a, task, s, query, R, tile_start, available);
  if (covered.first >= covered.last) return;
  float* scores = s.scores + static_cast<int64_t>(query) * kTileTokens;
  score_tile<R>(s, query, tile, covered.first_sub(), covered.last_sub(), scores);
  if (a.softcap > 0.0f) cap_scores<R>(a.softcap, covered.first_sub(), covered.last_sub(), scores);
  for (int r = 0; r < R; ++r) {
    const Range seen = covered_range(a, task, s, query + r, 1, tile_start, covered);
    s.alpha[query + r] = weigh_query(scores + r * kTileTokens, covered, seen, s.part_max + query + r,
                                     s.part_sum + static_cast<int64_t>(query + r) * kLanes);
  }
}

template <int R, class T, bool P>
static void add_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                        const Tile<T, P>& tile, int tile_start, Range available) {
  const Range covered = covered_range(a, task, s, query, R, tile_start, available);
  if (covered.first >= covered.last) return;
  add_tile<R>(s, query, tile, s.scores + static_cast<int64_t>(query) * kTileTokens, s.alpha + query, covered.first,
                 covered.last);
}

enum class Pass { weigh, add };

template <Pass Step, int R = kQueries, class T, bool P>
TRIREME_INLINE void dispatch_queries(int count, const AttentionArgs& a, const AttentionTask& task, const TaskState& s,
                                     int query, const Tile<T, P>& tile, int tile_start, Range available) {
  if constexpr (R > 0) {
    if (count != R) return dispatch_queries<Step, R - 1>(count, a, task, s, query, tile, tile_start, available);
    if constexpr (Step == Pass::weigh) weigh_queries<R>(a, task, s, query, tile, tile_start, available);
    if constexpr (Step == Pass::add) add_queries<R>(a, task, s, query, tile, tile_start, available);
  }
}

template <Pass Step, class T, bool P>
static void pass_over_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s,
                              const Tile<T, P>& tile, int tile_start, Range available) {
  // Groups of nearly equal size: 7 queries are 4 + 3, not 6 + 1.
  const int num_groups = (s.num_queries + kQueries - 1) / kQueries;
  int query = 0;
  for (int i = 0; i < num_groups; ++i) {
    const int count = (s.num_queries - query + num_groups - i - 1) / (num_groups - i);
    dispatch_queries<Step>(count, a, task, s, query, tile, tile_start, available);
    query += count;
  }
}

// All queries against the keys, then all against the values: each half of the tile stays in L1 meanwhile.
template <class T, bool P>
static void attend_tile(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, const Tile<T, P>& tile,
                        int tile_start, Range available) {
  pass_over_queries<Pass::weigh>(a, task, s, tile, tile_start, available);
  pass_over_queries<Pass::add>(a, task, s, tile, tile_start, available);
}

// ---------------------------------------------------------------- locating and packing the tiles

template <class T>
struct HeadCache {
  const T* k;
  const T* v;
  const int32_t* table;
  int64_t block_stride;
  int block_size;
  int dim;

  HeadCache(const AttentionArgs& a, const AttentionTask& task, int kv_head)
      : table(a.block_table + task.row * a.table_stride), block_size(a.kv.block_size), dim(a.kv.dim) {
    const int64_t head_size = static_cast<int64_t>(dim) * block_size;
    block_stride = head_size * a.kv.heads;
    k = static_cast<const T*>(a.kv.k) + kv_head * head_size;
    v = static_cast<const T*>(a.kv.v) + kv_head * head_size;
  }
  const T* key(int token) const { return k + table[token / block_size] * block_stride + token % block_size; }
  const T* value(int token) const {
    return v + table[token / block_size] * block_stride + static_cast<int64_t>(token % block_size) * dim;
  }
};

template <class T>
TRIREME_INLINE Tile<T, false> direct_tile(const HeadCache<T>& cache, int tile_start, Range available,
                                          const Upcoming<HeadCache<T>>& after) {
  Tile<T, false> tile;
  tile.key_stride = cache.block_size;
  tile.value_stride = cache.dim;
  for (int sub = 0; sub < kSubs; ++sub) {
    const bool used = sub >= available.first_sub() && sub < available.last_sub();
    const int token = tile_start + sub * kLanes;
    tile.keys[sub] = used ? cache.key(token) : nullptr;
    tile.values[sub] = used ? cache.value(token) : nullptr;
    const bool has_next = after.has(sub);
    tile.ahead_keys[sub] = has_next ? after.cache->key(after.token(sub)) : tile.keys[sub];
    tile.ahead_values[sub] = has_next ? after.cache->value(after.token(sub)) : tile.values[sub];
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
static Tile<float, true> packed_tile(const HeadCache<T>& cache, const TaskState& s, int tile_start, Range available) {
  Tile<float, true> tile;
  tile.key_stride = kLanes;
  tile.value_stride = s.dim_padded;
  for (int sub = 0; sub < kSubs; ++sub) {
    float* keys = s.packed_keys + static_cast<int64_t>(sub) * s.dim * kLanes;
    tile.keys[sub] = keys;
    tile.values[sub] = s.packed_values + static_cast<int64_t>(sub) * kLanes * s.dim_padded;
    tile.ahead_keys[sub] = tile.ahead_values[sub] = nullptr;
    if (sub >= available.first_sub() && sub < available.last_sub()) pack_keys(cache, tile_start, sub, available, keys);
  }
  for (int token = available.first; token < available.last; ++token) {
    pack_value(cache, tile_start + token, s.packed_values + static_cast<int64_t>(token) * s.dim_padded, s.dim_padded);
  }
  return tile;
}

template <class T>
static void attend_floats(const AttentionArgs& a, const AttentionTask& task, const TaskState& task_state, int part) {
  const bool is_aligned = a.kv.block_size % kLanes == 0 && a.kv.dim % kLanes == 0;
  const bool is_direct = is_aligned && task_state.num_queries <= 2 * kQueries;
  using Cache = HeadCache<T>;
  each_tile<Cache>(a, task, task_state, part, [&](const TaskState& s, const Cache& cache, int tile_start, Range available,
                                                  const Upcoming<Cache>& after) {
    if (is_direct) attend_tile(a, task, s, direct_tile(cache, tile_start, available, after), tile_start, available);
    else attend_tile(a, task, s, packed_tile(cache, s, tile_start, available), tile_start, available);
  });
}

static void scale_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s) {
  const float scale = a.softcap > 0.0f ? a.scale : a.scale * kLog2e;
  for (int query = 0; query < s.num_queries; ++query) {
    const int token = task.first_token + query / s.group;
    const int head = s.kv_head * s.group + query % s.group;
    const float* from = a.q + token * a.q_stride + static_cast<int64_t>(head) * s.dim;
    float* to = s.q + static_cast<int64_t>(query) * s.dim;
    for (int d = 0; d < s.dim; ++d) to[d] = from[d] * scale;
  }
}

}  // namespace trireme::TRIREME_VARIANT
