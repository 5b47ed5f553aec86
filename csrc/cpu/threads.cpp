// Pool behind threads.h. Work is published in one 64-bit word (call number, tasks left); a thread claims a task by
// decrementing it, so a late thread can never touch a finished call and the caller never waits for a thread without a
// task. Idle threads spin, yield, then sleep on a futex.
#include "cpu/threads.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <string>
#include <thread>

namespace trireme {
namespace {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t expected) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

int allowed_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

// Sets the calling thread's affinity. Returns whether the system allowed it.
bool keep_on(const cpu_set_t& set) { return sched_setaffinity(0, sizeof set, &set) == 0; }

cpu_set_t own_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return set;
}

thread_local bool inside_task = false;

class Pool {
 public:
  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int count) {
    std::lock_guard<std::mutex> lock(caller_);
    stop_threads();
    size_.store(std::max(1, count), std::memory_order_relaxed);
  }

  void set_cores(const std::vector<int>& cores) {
    std::lock_guard<std::mutex> lock(caller_);
    static const cpu_set_t all = own_cores();
    std::vector<cpu_set_t> sets;
    for (int core : cores) {
      if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &all)) {
        throw std::system_error(EINVAL, std::generic_category(), "core " + std::to_string(core) + " is not ours");
      }
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(core, &one);
      sets.push_back(one);
    }
    if (sets.empty()) sets.push_back(all);
    stop_threads();  // they restart with the new affinity
    if (!keep_on(sets[0])) throw std::system_error(errno, std::generic_category(), "sched_setaffinity");
    cores_ = sets;
  }

  void set_spin(int spin_us) { spin_us_.store(std::max(0, spin_us), std::memory_order_relaxed); }

  void run(int num_tasks, TaskFn fn, void* context) {
    if (num_tasks <= 0) return;
    if (num_tasks == 1 || inside_task || size() == 1 || !caller_.try_lock()) {
      run_serially(num_tasks, fn, context);
      return;
    }
    std::lock_guard<std::mutex> lock(caller_, std::adopt_lock);
    if (started_ != size()) start_threads();
    publish(num_tasks, fn, context);
    work(0);
    wait_until_done();
  }

 private:
  static void run_serially(int num_tasks, TaskFn fn, void* context) {
    const bool outer = inside_task;
    inside_task = true;
    for (int task = 0; task < num_tasks; ++task) fn(context, task, 0);
    inside_task = outer;
  }

  // Safe to overwrite the call's fields: the previous call has no task unclaimed or in progress.
  void publish(int num_tasks, TaskFn fn, void* context) {
    fn_ = fn;
    context_ = context;
    num_tasks_ = static_cast<uint32_t>(num_tasks);
    unfinished_.store(num_tasks_, std::memory_order_relaxed);
    const uint32_t call = static_cast<uint32_t>(claim_.load(std::memory_order_relaxed) >> 32) + 1;
    claim_.store((static_cast<uint64_t>(call) << 32) | num_tasks_, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_word_.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(&wake_word_);
    }
  }

  // Claims and runs tasks until none is left.
  void work(int thread) {
    inside_task = true;
    uint64_t claim = claim_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(claim) != 0) {
      if (!claim_.compare_exchange_weak(claim, claim - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      fn_(context_, static_cast<int>(num_tasks_ - static_cast<uint32_t>(claim)), thread);
      unfinished_.fetch_sub(1, std::memory_order_acq_rel);
      claim = claim_.load(std::memory_order_acquire);
    }
    inside_task = false;
  }

  void wait_until_done() {
    int spins = 0;
    while (unfinished_.load(std::memory_order_acquire) != 0) {
      if (++spins < 2000) {
        cpu_pause();
      } else {
        sched_yield();  // the thread we wait for may need this CPU
      }
    }
  }

  bool has_work() const { return static_cast<uint32_t>(claim_.load(std::memory_order_acquire)) != 0; }

  // Returns when there may be work, or when the pool stops.
  void wait_for_work() {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const auto spin = std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
    const auto polite = std::min<Clock::duration>(spin / 2, std::chrono::microseconds(20));
    while (true) {
      for (int i = 0; i < 32; ++i) {
        if (has_work() || stopping_.load(std::memory_order_relaxed)) return;
        cpu_pause();
      }
      const auto waited = Clock::now() - start;
      if (waited > spin) break;
      if (waited > polite) sched_yield();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t word = wake_word_.load(std::memory_order_seq_cst);
    if (static_cast<uint32_t>(claim_.load(std::memory_order_seq_cst)) == 0 && !stopping_.load(std::memory_order_seq_cst)) {
      futex_wait(&wake_word_, word);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void thread_main(int thread) {
    if (!cores_.empty()) keep_on(cores_[thread % cores_.size()]);
    while (!stopping_.load(std::memory_order_acquire)) {
      work(thread);
      wait_for_work();
    }
  }

  void start_threads() {
    stop_threads();
    started_ = size();
    threads_ = new std::thread[started_];
    for (int thread = 1; thread < started_; ++thread) {
      threads_[thread] = std::thread([this, thread] { thread_main(thread); });
    }
  }

  void stop_threads() {
    if (started_ == 0) return;
    stopping_.store(true, std::memory_order_seq_cst);
    wake_word_.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&wake_word_);
    for (int thread = 1; thread < started_; ++thread) threads_[thread].join();
    delete[] threads_;
    threads_ = nullptr;
    started_ = 0;
    stopping_.store(false, std::memory_order_seq_cst);
  }

  alignas(64) std::atomic<uint64_t> claim_{0};  // call number << 32 | tasks not yet claimed
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  alignas(64) std::atomic<uint32_t> wake_word_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> spin_us_{60};
  alignas(64) TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  uint32_t num_tasks_ = 0;
  std::mutex caller_;
  std::vector<cpu_set_t> cores_;  // of thread i % size; empty until set_cores
  std::atomic<int> size_{allowed_cpus()};
  int started_ = 0;
  std::thread* threads_ = nullptr;
};

// Never destroyed: threads may outlive static destruction at process exit.
Pool& pool() {
  static Pool* instance = new Pool();
  return *instance;
}

}  // namespace

int num_threads() { return pool().size(); }
void set_num_threads(int count) { pool().resize(count); }
void set_cores(const std::vector<int>& cores) { pool().set_cores(cores); }
void set_spin_us(int spin_us) { pool().set_spin(spin_us); }
void run_parallel(int num_tasks, TaskFn fn, void* context) { pool().run(num_tasks, fn, context); }

}  // namespace trireme
