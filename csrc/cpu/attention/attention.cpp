// Splits a step's attention into tasks for the pool: (sequence, KV heads, range of queries), and if those are few and contexts
// long, one task per part of the context. The split never changes a result (attention_impl.h).
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "cpu/elementwise/ops.h"
#include "cpu/threads.h"

namespace trireme {
namespace {

constexpr int kTaskQueries = 96;            // per task: enough to reuse a tile of keys, few enough to stay in cache
constexpr int64_t kShares = 4;              // tasks per thread from which they balance evenly
constexpr int64_t kLargeProducts = 250000;  // multiply-adds below which one thread is faster

// Scratch memory of one thread, kept between calls.
class Scratch {
 public:
  float* take(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = (floats + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(size_) * sizeof(float)));
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

thread_local Scratch task_scratch;
thread_local Scratch partial_scratch;
thread_local std::vector<AttentionTask> task_list;

int group_of(const AttentionArgs& a) { return a.q_heads / a.kv.heads; }
int tokens_per_task(const AttentionArgs& a) { return std::max(1, kTaskQueries / group_of(a)); }

int first_part(const AttentionArgs& a, const AttentionTask& task) {
  return a.window > 0 ? std::max(0, task.first_position - a.window + 1) / kPartTokens : 0;
}
int last_part(const AttentionTask& task) { return (task.first_position + task.num_tokens - 1) / kPartTokens; }

int64_t whole_context(const AttentionArgs& a) {
  int64_t tokens = 0;
  for (int row = 0; row < a.rows; ++row) tokens += a.context_len[row];
  return tokens;
}

// KV heads of one task for `count` tokens of a sequence. All of them if the queries are few and the sequence a small part of the
// step: reads are then contiguous.
int heads_per_task(const AttentionArgs& a, int row, int count, int64_t context) {
  const bool is_small = a.context_len[row] * kShares * num_threads() <= context;
  return count * a.q_heads <= kTaskQueries && is_small ? a.kv.heads : 1;
}

// Calls f(task) for every task of the step.
template <class F>
void each_task(const AttentionArgs& a, F&& f) {
  const int most = tokens_per_task(a);
  const int64_t context = whole_context(a);
  for (int row = 0; row < a.rows; ++row) {
    const int start = a.query_start[row], count = a.query_start[row + 1] - start;
    const int base = a.context_len[row] - count;
    const int heads = heads_per_task(a, row, count, context);
    for (int token = 0; token < count; token += most) {
      for (int head = 0; head < a.kv.heads; head += heads) {
        f(AttentionTask{row, head, heads, start + token, std::min(most, count - token), base + token, -1, nullptr});
      }
    }
  }
}

int64_t cost(const AttentionTask& task) {
  return static_cast<int64_t>(task.num_heads) * task.num_tokens * (task.first_position + task.num_tokens);
}

int64_t partial_floats(const AttentionArgs& a, const AttentionTask& task) {
  return task.num_heads * task.num_tokens * group_of(a) * partial_stride(a.kv.dim);
}

void attend_serially(const AttentionArgs& a, int64_t scratch_floats) {
  const OpsKernels& kernels = ops_kernels();
  each_task(a, [&](const AttentionTask& task) { kernels.attend(a, task, task_scratch.take(scratch_floats)); });
}

void attend_whole(const AttentionArgs& a, const std::vector<AttentionTask>& tasks, int64_t scratch_floats) {
  const OpsKernels& kernels = ops_kernels();
  parallel(static_cast<int>(tasks.size()), [&](int i, int) {
    kernels.attend(a, tasks[static_cast<size_t>(i)], task_scratch.take(scratch_floats));
  });
}

// One task per (task, part): partial results, then a merge per task.
void attend_by_parts(const AttentionArgs& a, const std::vector<AttentionTask>& tasks, int64_t scratch_floats) {
  const OpsKernels& kernels = ops_kernels();
  std::vector<AttentionTask> pieces;
  std::vector<size_t> first_piece;
  int64_t floats = 0;
  for (const AttentionTask& task : tasks) {
    first_piece.push_back(pieces.size());
    for (int part = first_part(a, task); part <= last_part(task); ++part) {
      pieces.push_back(task);
      pieces.back().part = part;
      floats += partial_floats(a, task);
    }
  }
  first_piece.push_back(pieces.size());
  float* partial = partial_scratch.take(floats);
  for (AttentionTask& piece : pieces) {
    piece.partial = partial;
    partial += partial_floats(a, piece);
  }
  parallel(static_cast<int>(pieces.size()), [&](int i, int) {
    kernels.attend(a, pieces[static_cast<size_t>(i)], task_scratch.take(scratch_floats));
  });
  for (size_t i = 0; i < tasks.size(); ++i) {
    AttentionTask task = tasks[i];
    task.partial = pieces[first_piece[i]].partial;
    const int num_parts = static_cast<int>(first_piece[i + 1] - first_piece[i]);
    kernels.fold_parts(a, task, num_parts, partial_floats(a, task), task_scratch.take(scratch_floats));
  }
}

}  // namespace

int64_t attention_scratch_floats(int num_queries, int dim) {
  const int64_t padded = (dim + 15) / 16 * 16, n = (num_queries + 15) / 16 * 16;
  return n * (3 * padded + 16 + kTileTokens + 5) + 2 * kTileTokens * (padded + 1);
}

bool is_large(const AttentionArgs& a) {
  int64_t pairs = 0;
  for (int row = 0; row < a.rows; ++row) {
    const int64_t seen = a.window > 0 ? std::min(a.context_len[row], a.window + kTileTokens) : a.context_len[row];
    pairs += (a.query_start[row + 1] - a.query_start[row]) * seen;
  }
  return pairs * a.q_heads * a.kv.dim * 2 >= kLargeProducts;
}

void paged_attention(const AttentionArgs& a) {
  int most_tokens = 0, longest = 0;
  for (int row = 0; row < a.rows; ++row) {
    most_tokens = std::max(most_tokens, a.query_start[row + 1] - a.query_start[row]);
    longest = std::max(longest, a.context_len[row]);
  }
  const int num_queries = std::max(kTaskQueries, std::min(most_tokens, tokens_per_task(a)) * group_of(a));
  const int64_t scratch_floats = attention_scratch_floats(num_queries, a.kv.dim);
  const int threads = num_threads();
  if (threads == 1 || !is_large(a)) return attend_serially(a, scratch_floats);
  std::vector<AttentionTask>& tasks = task_list;
  tasks.clear();
  each_task(a, [&](const AttentionTask& task) { tasks.push_back(task); });
  if (static_cast<int>(tasks.size()) < 3 * threads && longest > kPartTokens) {
    return attend_by_parts(a, tasks, scratch_floats);
  }
  // Longest tasks first, so that the threads finish together.
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const AttentionTask& x, const AttentionTask& y) { return cost(x) > cost(y); });
  attend_whole(a, tasks, scratch_floats);
}

}  // namespace trireme
