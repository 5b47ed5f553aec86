// Attention over caches of integers (KvView in ops.h), for one instruction set. Included by attention_impl.h.
//
// Both GEMMs are sums of int16 multiplies, exact in int32, with tokens or dims in the lanes, two of the other per step:
//
//     score[r][16 tokens] = (sum over d of q[r][d] * k[d][16 tokens]) * unit of the query * units of the keys
//     w[r][j] = 2^(score[r][j] - max of the tile) * unit of the value           W = round(w * 32767 / sum of the tile's w)
//     out[r][16 dims] = out * alpha + (sum over j of W[r][j] * v[j][16 dims]) * factor
//
// No overflow: q has L2 norm 32767 and k at most that (Cauchy-Schwarz), and the W of a tile sum to 32767. The error of a score
// is at most sqrt(dim) / 65534 * |q| |k| * scale per quantization, that of a weight 1 / 65534 of its tile's sum.
#pragma once

#include "cpu/attention/attention_common_impl.h"
#include "cpu/elementwise/elementwise_impl.h"

namespace trireme::TRIREME_VARIANT {

// Columns of 16 lanes per query. On AVX2 an addition takes one cycle, so loads are the bottleneck; AVX-512 accumulates within the
// multiply's five cycles.
constexpr int num_integer_columns([[maybe_unused]] int queries) {
#if defined(__AVX512F__)
  return queries <= 3 ? 4 : 2;
#elif defined(__AVX2__)
  return queries <= 2 ? 2 : 1;
#else
  return 1;
#endif
}

// Locations of the elements and units of one tile: pointers per 16 tokens, strides in elements. With Ahead, one cache line of the
// next tile is prefetched per step: blocks are scattered, which hardware prefetchers do not predict.
template <class T, bool Ahead>
struct IntegerTile {
  const T* keys[kSubs];    // [dim / 2][16][2]
  const T* values[kSubs];  // [8][dim][2]
  const float* key_units[kSubs];
  const float* value_units[kSubs];
  const T* ahead_keys[kSubs];
  const T* ahead_values[kSubs];
  const float* ahead_key_units[kSubs];
  const float* ahead_value_units[kSubs];
  int64_t key_stride;
  int64_t value_stride;
};

// Scratch of a few queries between the passes over one tile.
struct Weighed {
  alignas(64) float scores[kQueries][kTileTokens];  // then w
  alignas(64) int16_t weights[kQueries][kTileTokens];
  alignas(64) float sums[kQueries][kLanes];    // of p, per lane
  alignas(64) float totals[kQueries][kLanes];  // of w, per lane
  alignas(64) float alpha[kLanes];
  alignas(64) float factor[kLanes];
};

// ---------------------------------------------------------------- register tiles

template <int R, int N, class T, bool Ahead>
TRIREME_INLINE void score_integers(const int16_t* q, int q_stride, int num_pairs, const IntegerTile<T, Ahead>& tile, int sub,
                                   Weighed& out) {
  Ints sums[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = no_ints();
  }
  int64_t at = 0;
  for (int pair = 0; pair < num_pairs; ++pair, at += tile.key_stride) {
    Pairs keys[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      keys[n] = load_pairs(tile.keys[sub + n] + at);
      if constexpr (Ahead) __builtin_prefetch(tile.ahead_keys[sub + n] + at, 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Pair both = repeat_pair(q + static_cast<int64_t>(r) * q_stride + 2 * pair);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) add_products(sums[r][n], both, keys[n]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const Vec units = load(tile.key_units[sub + n]);
    if constexpr (Ahead) __builtin_prefetch(tile.ahead_key_units[sub + n], 0, 2);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(out.scores[r] + (sub + n) * kLanes, mul(to_floats(sums[r][n]), units));
  }
}

template <int R, int N, class T, bool Ahead>
TRIREME_INLINE void add_integers(const Weighed& w, const IntegerTile<T, Ahead>& tile, int column, int first_sub, int last_sub,
                                 float* out, int out_stride) {
  Ints sums[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = no_ints();
  }
  for (int sub = first_sub; sub < last_sub; ++sub) {
    const T* row = tile.values[sub] + 2 * column;
    const T* ahead = tile.ahead_values[sub] + 2 * column;
    const int16_t* weights = w.weights[0] + sub * kLanes;
    if constexpr (Ahead) __builtin_prefetch(tile.ahead_value_units[sub], 0, 2);
    for (int pair = 0; pair < kLanes / 2; ++pair, row += tile.value_stride, ahead += tile.value_stride) {
      Pairs values[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        values[n] = load_pairs(row + 2 * n * kLanes);
        if constexpr (Ahead) __builtin_prefetch(ahead + 2 * n * kLanes, 0, 2);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Pair both = repeat_pair(weights + r * kTileTokens + 2 * pair);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) add_products(sums[r][n], both, values[n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec alpha = set1(w.alpha[r]), factor = set1(w.factor[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      float* at = out + static_cast<int64_t>(r) * out_stride + n * kLanes;
      store(at, fma(to_floats(sums[r][n]), factor, mul(load(at), alpha)));
    }
  }
}

// ---------------------------------------------------------------- softmax over one tile

template <bool Full>
TRIREME_INLINE float largest_score(const float* scores, Range covered, Range seen) {
  Vec best = set1(kNegInf);
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    Vec score = load(scores + sub * kLanes);
    if constexpr (!Full) {
      const SeenLanes lanes(seen, sub);
      if (!lanes.all()) score = keep_lanes(score, lanes.first, lanes.last, set1(kNegInf));
    }
    best = max(best, score);
  }
  return reduce_max(best);
}

// Converts the scores of one query into w, and sums p and w per lane.
template <bool Full>
TRIREME_INLINE void weigh_scores(float* scores, const float* const* value_units, Range covered, Range seen, float unit,
                                 float largest, float* sum_lanes, float* total_lanes) {
  const Vec units = set1(unit), shift = set1(-largest);
  Vec sum = zero(), total = zero();
  for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
    Vec p = exp2(fma(load(scores + sub * kLanes), units, shift));
    Vec w = mul(p, load(value_units[sub]));
    if constexpr (!Full) {
      const SeenLanes lanes(seen, sub);
      if (!lanes.all()) {
        p = keep_lanes(p, lanes.first, lanes.last, zero());
        w = keep_lanes(w, lanes.first, lanes.last, zero());
      }
    }
    sum = add(sum, p);
    total = add(total, w);
    store(scores + sub * kLanes, w);
  }
  store(sum_lanes, sum);
  store(total_lanes, total);
}

// Merges the tile's softmax into the running state of this part, for R queries in the lanes: `largest` are their tile maxima,
// `total` their sums of w.
template <int R>
TRIREME_INLINE void join_softmax(const TaskState& s, int query, const float (&largest)[R], const float (&total)[R], Weighed& w) {
  const Vec before = load_first(s.part_max + query, R), here = from_lanes(largest);
  const Vec after = max(set1(-1e30f), max(before, here));
  const Vec beta = exp2(sub(here, after));
  store(w.alpha, exp2(sub(before, after)));
  store(w.factor, mul(beta, mul(from_lanes(total), set1(1.0f / 32767.0f))));
  store_first(s.part_max + query, after, R);
  float betas[kLanes];
  store(betas, beta);
  for (int r = 0; r < R; ++r) {
    float* sum = s.part_sum + static_cast<int64_t>(query + r) * kLanes;
    store(sum, fma(load(w.sums[r]), set1(betas[r]), mul(load(sum), set1(w.alpha[r]))));
  }
}

template <int R, bool Full>
static void weigh_tile(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query, int tile_start,
                               const float* const* value_units, Range covered, Weighed& w) {
  const float* units = s.q_unit + query;
  if (a.softcap > 0.0f) {
    for (int r = 0; r < R; ++r) {
      for (int i = covered.first_sub() * kLanes; i < covered.last_sub() * kLanes; i += kLanes) {
        store(w.scores[r] + i, mul(load(w.scores[r] + i), set1(units[r])));
      }
    }
    cap_scores<R>(a.softcap, covered.first_sub(), covered.last_sub(), w.scores[0]);
  }
  Range seen[R];
  float largest[R], total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    seen[r] = Full ? covered : covered_range(a, task, s, query + r, 1, tile_start, covered);
    largest[r] = seen[r].first < seen[r].last ? largest_score<Full>(w.scores[r], covered, seen[r]) : kNegInf;
  }
  // Pass by pass over all queries, so that several horizontal sums are in flight at once.
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const float unit = a.softcap > 0.0f ? 1.0f : units[r];
    if (seen[r].first < seen[r].last) largest[r] *= unit;
    weigh_scores<Full>(w.scores[r], value_units, covered, seen[r], unit, largest[r], w.sums[r], w.totals[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) total[r] = reduce_add(load(w.totals[r]));
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const bool has_any = total[r] > 1e-30f || total[r] != total[r];
    const Vec inverse = set1(has_any ? 32767.0f / total[r] : 0.0f);
    for (int sub = covered.first_sub(); sub < covered.last_sub(); ++sub) {
      store_ints(w.weights[r] + sub * kLanes, mul(load(w.scores[r] + sub * kLanes), inverse));
    }
  }
  join_softmax<R>(s, query, largest, total, w);
}

template <int R, class T, bool Ahead>
static void attend_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                           const IntegerTile<T, Ahead>& tile, int tile_start, Range available, Weighed& w) {
  constexpr int N = num_integer_columns(R);
  const Range covered = covered_range(a, task, s, query, R, tile_start, available);
  if (covered.first >= covered.last) return;
  const int first_sub = covered.first_sub(), last_sub = covered.last_sub();
  const int16_t* q = reinterpret_cast<const int16_t*>(s.q) + static_cast<int64_t>(query) * s.dim_padded;
  int sub = first_sub;
  for (; sub + N <= last_sub; sub += N) score_integers<R, N>(q, s.dim_padded, s.dim / 2, tile, sub, w);
  for (; sub < last_sub; ++sub) score_integers<R, 1>(q, s.dim_padded, s.dim / 2, tile, sub, w);

  const int first_position = task.first_position + query / s.group;
  const int last_position = task.first_position + (query + R - 1) / s.group;
  const bool is_full = covered.first == 0 && covered.last == kTileTokens && first_position >= tile_start + kTileTokens - 1 &&
                       first_seen(last_position, a.window) <= tile_start;
  if (is_full) weigh_tile<R, true>(a, task, s, query, tile_start, tile.value_units, Range{0, kTileTokens}, w);
  else weigh_tile<R, false>(a, task, s, query, tile_start, tile.value_units, covered, w);

  float* out = s.part_out + static_cast<int64_t>(query) * s.dim_padded;
  int column = 0;
  for (; column + N * kLanes <= s.dim_padded; column += N * kLanes) {
    add_integers<R, N>(w, tile, column, first_sub, last_sub, out + column, s.dim_padded);
  }
  for (; column < s.dim_padded; column += kLanes) {
    add_integers<R, 1>(w, tile, column, first_sub, last_sub, out + column, s.dim_padded);
  }
}

template <int R = kQueries, class T, bool Ahead>
TRIREME_INLINE void attend_some(int count, const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int query,
                                const IntegerTile<T, Ahead>& tile, int tile_start, Range available, Weighed& w) {
  if constexpr (R > 0) {
    if (count == R) return attend_queries<R>(a, task, s, query, tile, tile_start, available, w);
    attend_some<R - 1>(count, a, task, s, query, tile, tile_start, available, w);
  }
}

// All queries of the task, in groups of nearly equal size: 7 are 4 + 3, not 6 + 1.
template <class T, bool Ahead>
static void attend_integer_tile(const AttentionArgs& a, const AttentionTask& task, const TaskState& s,
                                const IntegerTile<T, Ahead>& tile, int tile_start, Range available) {
  Weighed w;
  const int num_groups = (s.num_queries + kQueries - 1) / kQueries;
  int query = 0;
  for (int i = 0; i < num_groups; ++i) {
    const int count = (s.num_queries - query + num_groups - i - 1) / (num_groups - i);
    attend_some(count, a, task, s, query, tile, tile_start, available, w);
    query += count;
  }
}

// ---------------------------------------------------------------- locating and packing the tiles

template <class T>
struct IntegerCache {
  const char* k;
  const char* v;
  const int32_t* table;
  int64_t block_bytes;
  int64_t numbers;  // elements of one head of a block
  int block_size;
  int dim;

  IntegerCache(const AttentionArgs& a, const AttentionTask& task, int kv_head)
      : table(a.block_table + task.row * a.table_stride), block_size(a.kv.block_size), dim(a.kv.dim) {
    const int64_t head_bytes = kv_head_bytes(a.kv.type, dim, block_size);
    numbers = static_cast<int64_t>(dim) * block_size;
    block_bytes = head_bytes * a.kv.heads;
    k = static_cast<const char*>(a.kv.k) + kv_head * head_bytes;
    v = static_cast<const char*>(a.kv.v) + kv_head * head_bytes;
  }
  const T* head(const char* start, int token) const {
    return reinterpret_cast<const T*>(start + table[token / block_size] * block_bytes);
  }
  const T* key(int token) const { return head(k, token) + token % block_size * 2; }
  // Of an even token.
  const T* value(int token) const { return head(v, token) + static_cast<int64_t>(token % block_size) * dim; }
  const float* units(const char* start, int token) const {
    return reinterpret_cast<const float*>(head(start, token) + numbers) + token % block_size;
  }
};

template <bool Ahead, class T>
TRIREME_INLINE IntegerTile<T, Ahead> direct_integers(const IntegerCache<T>& cache, int tile_start, Range available,
                                                     const Upcoming<IntegerCache<T>>& after) {
  IntegerTile<T, Ahead> tile;
  tile.key_stride = 2 * cache.block_size;
  tile.value_stride = 2 * cache.dim;
  for (int sub = 0; sub < kSubs; ++sub) {
    const bool used = sub >= available.first_sub() && sub < available.last_sub();
    const int token = tile_start + sub * kLanes;
    tile.keys[sub] = used ? cache.key(token) : nullptr;
    tile.values[sub] = used ? cache.value(token) : nullptr;
    tile.key_units[sub] = used ? cache.units(cache.k, token) : nullptr;
    tile.value_units[sub] = used ? cache.units(cache.v, token) : nullptr;
    const bool has_next = Ahead && after.has(sub);
    const IntegerCache<T>& next = *after.cache;
    tile.ahead_keys[sub] = has_next ? next.key(after.token(sub)) : tile.keys[sub];
    tile.ahead_values[sub] = has_next ? next.value(after.token(sub)) : tile.values[sub];
    tile.ahead_key_units[sub] = has_next ? next.units(next.k, after.token(sub)) : tile.key_units[sub];
    tile.ahead_value_units[sub] = has_next ? next.units(next.v, after.token(sub)) : tile.value_units[sub];
  }
  return tile;
}

// Copies a tile to scratch token by token; tokens outside `available` become zero.
template <class T>
static IntegerTile<int16_t, false> packed_integers(const IntegerCache<T>& cache, const TaskState& s, int tile_start,
                                                   Range available) {
  IntegerTile<int16_t, false> tile;
  tile.key_stride = 2 * kLanes;
  tile.value_stride = 2 * s.dim_padded;
  int16_t* keys = reinterpret_cast<int16_t*>(s.packed_keys);
  int16_t* values = reinterpret_cast<int16_t*>(s.packed_values);
  std::memset(keys, 0, sizeof(int16_t) * static_cast<size_t>(kTileTokens) * s.dim_padded);
  std::memset(values, 0, sizeof(int16_t) * static_cast<size_t>(kTileTokens) * s.dim_padded);
  std::memset(s.packed_units, 0, sizeof(float) * 2 * kTileTokens);
  for (int sub = 0; sub < kSubs; ++sub) {
    tile.keys[sub] = tile.ahead_keys[sub] = keys + static_cast<int64_t>(sub) * s.dim_padded * kLanes;
    tile.values[sub] = tile.ahead_values[sub] = values + static_cast<int64_t>(sub) * s.dim_padded * kLanes;
    tile.key_units[sub] = s.packed_units + sub * kLanes;
    tile.value_units[sub] = s.packed_units + kTileTokens + sub * kLanes;
  }
  for (int token = available.first; token < available.last; ++token) {
    const int position = tile_start + token, lane = token % kLanes, even = position & ~1;
    const T* key = cache.key(position);
    const T* value = cache.value(even) + (position - even);
    int16_t* to_key = keys + static_cast<int64_t>(token / kLanes) * s.dim_padded * kLanes + 2 * lane;
    int16_t* to_value = values + static_cast<int64_t>(token / 2) * 2 * s.dim_padded + token % 2;
    for (int d = 0; d < cache.dim; ++d) {
      to_key[d / 2 * 2 * kLanes + d % 2] = key[static_cast<int64_t>(d / 2) * 2 * cache.block_size + d % 2];
      to_value[2 * d] = value[2 * d];
    }
    s.packed_units[token] = *cache.units(cache.k, position);
    s.packed_units[kTileTokens + token] = *cache.units(cache.v, position);
  }
  return tile;
}

template <class T>
static void attend_integers(const AttentionArgs& a, const AttentionTask& task, const TaskState& task_state, int part) {
  const bool is_direct = a.kv.block_size % kLanes == 0 && a.kv.dim % kLanes == 0;
  const bool is_short = task_state.num_queries <= 2 * kQueries;
  using Cache = IntegerCache<T>;
  each_tile<Cache>(a, task, task_state, part, [&](const TaskState& s, const Cache& cache, int tile_start, Range available,
                                                  const Upcoming<Cache>& after) {
    if (!is_direct) {
      attend_integer_tile(a, task, s, packed_integers(cache, s, tile_start, available), tile_start, available);
    } else if (is_short) {
      attend_integer_tile(a, task, s, direct_integers<true>(cache, tile_start, available, after), tile_start, available);
    } else {
      attend_integer_tile(a, task, s, direct_integers<false>(cache, tile_start, available, after), tile_start, available);
    }
  });
}

// Quantizes queries to integers of L2 norm 32767, with the factor for their scores.
static void round_queries(const AttentionArgs& a, const AttentionTask& task, const TaskState& s) {
  const float scale = a.softcap > 0.0f ? a.scale : a.scale * kLog2e;
  for (int query = 0; query < s.num_queries; ++query) {
    const int token = task.first_token + query / s.group;
    const int head = s.kv_head * s.group + query % s.group;
    const float* from = a.q + token * a.q_stride + static_cast<int64_t>(head) * s.dim;
    const float unit = std::sqrt(sum_squares(from, s.dim)) / 32767.0f;
    divide_row(from, unit, reinterpret_cast<int16_t*>(s.q) + static_cast<int64_t>(query) * s.dim_padded, s.dim);
    s.q_unit[query] = unit * scale;
  }
}

}  // namespace trireme::TRIREME_VARIANT
