// Paged attention for one instruction set. Included by ops_*.cpp. A task is some queries of one sequence (tokens times the
// query heads of some KV heads); attention_floats_impl.h and attention_ints_impl.h compute one part of it.
#pragma once

#include "cpu/attention/attention_floats_impl.h"
#include "cpu/attention/attention_ints_impl.h"

namespace trireme::TRIREME_VARIANT {

template <class T>
static void attend_part(const AttentionArgs& a, const AttentionTask& task, const TaskState& s, int part) {
  start_part(s);
  if constexpr (kIsInteger<T>) attend_integers<T>(a, task, s, part);
  else attend_floats<T>(a, task, s, part);
}

template <class T>
static void attend_typed(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  const TaskState s = lay_out_scratch(a, task, scratch);
  for (int head = 0; head < s.num_heads; ++head) {
    if constexpr (kIsInteger<T>) round_queries(a, task, s.of_head(head));
    else scale_queries(a, task, s.of_head(head));
  }
  if (task.part >= 0) {
    attend_part<T>(a, task, s, task.part);
    for (int query = 0; query < s.all_queries(); ++query) {
      float* record = task.partial + query * partial_stride(s.dim);
      copy_lanes(s.part_out + static_cast<int64_t>(query) * s.dim_padded, record, s.dim_padded);
      record[s.dim_padded] = s.part_max[query];
      record[s.dim_padded + 1] = reduce_add(load(s.part_sum + static_cast<int64_t>(query) * kLanes));
    }
    return;
  }
  for (int query = 0; query < s.all_queries(); ++query) s.total_sum[query] = 0.0f;
  const int last_part = (task.first_position + task.num_tokens - 1) / kPartTokens;
  for (int part = first_seen(task.first_position, a.window) / kPartTokens; part <= last_part; ++part) {
    attend_part<T>(a, task, s, part);
    for (int query = 0; query < s.all_queries(); ++query) {
      const int64_t at = static_cast<int64_t>(query) * s.dim_padded;
      const float sum = reduce_add(load(s.part_sum + static_cast<int64_t>(query) * kLanes));
      fold_part(s.part_out + at, s.part_max[query], sum, s.total_out + at, s.total_max + query, s.total_sum + query,
                s.dim_padded);
    }
  }
  for (int query = 0; query < s.all_queries(); ++query) {
    write_out(a, task, s, query, s.total_out + static_cast<int64_t>(query) * s.dim_padded, s.total_sum[query]);
  }
}

static void attend(const AttentionArgs& a, const AttentionTask& task, float* scratch) {
  switch (a.kv.type) {
    case KvType::f32: return attend_typed<float>(a, task, scratch);
    case KvType::f16: return attend_typed<Half>(a, task, scratch);
    case KvType::bf16: return attend_typed<BFloat>(a, task, scratch);
    case KvType::i8: return attend_typed<int8_t>(a, task, scratch);
    case KvType::i16: return attend_typed<int16_t>(a, task, scratch);
  }
}

static void fold_parts(const AttentionArgs& a, const AttentionTask& task, int num_parts, int64_t part_stride,
                       float* scratch) {
  const TaskState s = lay_out_scratch(a, task, scratch);
  for (int query = 0; query < s.all_queries(); ++query) {
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
