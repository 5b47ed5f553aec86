// Collectives of the CPU ranks of one engine over a shared-memory arena (laid out by trireme/topology/arena.py). One Comm per
// worker, used by one thread. Every rank must make the same calls in the same order. No call blocks forever: a time-out, a peer's
// death or the abort word ends it with CommError, after which the engine's arena is unusable.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace trireme {

struct CommError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// trireme/topology/arena.py writes these fields.
struct ArenaHeader {
  uint32_t magic;
  uint32_t version;
  std::atomic<uint32_t> abort;  // 0, 1 by the owner, 16 + worker by that worker
  uint32_t tp;
  uint32_t pp;
  uint32_t unused;
  uint64_t slot_bytes;
  uint64_t ring_bytes;
  uint64_t group_bytes;
  uint64_t rings_offset;
  uint64_t total;
};

// A counter that others wait for. Lives in shared memory, initially zero, on its own cache lines.
struct alignas(128) Flag {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> waiters;
};

class Comm {
 public:
  // timeout_s bounds the wait for the other ranks of a stage, step_timeout_s the wait for a neighbouring stage.
  Comm(const std::string& path, int tp_rank, int pp_rank, double timeout_s, double step_timeout_s);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // All-reduce: x += the other ranks' x, in rank order for any size, so all ranks get the same bits.
  void all_reduce(float* x, size_t count);
  // All-gather: rank r contributes rows of sizes[r] bytes; out has rows of sum(sizes) bytes.
  void all_gather(const char* x, char* out, size_t rows, const std::vector<size_t>& sizes);
  // Reduce-scatter: x has rows of sum(sizes) floats; out gets this rank's summed columns.
  void reduce_scatter(const float* x, float* out, size_t rows, const std::vector<size_t>& sizes);
  void broadcast(char* x, size_t bytes, int root);
  void barrier();
  void send_next(const char* x, size_t bytes);
  void recv_prev(char* x, size_t bytes);
  // Fails all present and future collectives of the engine.
  void abort();

 private:
  struct Ring {
    Flag* written = nullptr;
    Flag* read = nullptr;
    char* data = nullptr;
    uint64_t position = 0;  // bytes passed on this side
  };

  int worker_at(int stage, int tp_rank) const { return stage * tp_ + tp_rank; }
  Flag& arrived(int rank) const;
  char* slot(int rank) const;
  void begin() { ++operation_; }
  void arrive_and_wait(const char* what);
  void wait(Flag& flag, uint32_t target, int peer, double timeout_s, const char* what);
  bool sleep_until(Flag& flag, uint32_t target, int peer, double deadline, const char* what);
  bool is_dead(int peer);
  void check_abort(const char* what) const;
  [[noreturn]] void fail(const std::string& message);
  void reduce_once(float* x, size_t count);
  void reduce_in_shares(float* x, size_t count);
  void ring_write(const char* x, size_t bytes);
  void ring_read(char* x, size_t bytes);

  char* base_ = nullptr;
  size_t total_ = 0;
  ArenaHeader* header_ = nullptr;
  std::atomic<uint32_t>* pids_ = nullptr;
  int tp_ = 1, pp_ = 1, rank_ = 0, stage_ = 0;
  double timeout_s_, step_timeout_s_;
  bool may_spin_ = true;
  uint32_t sequence_ = 0;   // number of arrivals
  uint64_t operation_ = 0;  // its parity selects the slots
  std::vector<int> pidfds_;
  Ring next_, prev_;
};

}  // namespace trireme
