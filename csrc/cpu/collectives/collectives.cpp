// See collectives.h. A rank copies its data into its slot, raises its flag, waits for all flags of the stage, then reads. Each
// rank alternates two slots: before a slot is rewritten, all ranks have arrived at the operation in between, so all have read
// it. Waiting spins, then yields while no other process wants the CPU, then sleeps on a futex in slices, checking for aborts
// and dead peers after each.
#include "cpu/collectives/collectives.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>

namespace trireme {
namespace {

constexpr uint32_t kMagic = 0x414d5254, kVersion = 1;
constexpr size_t kPage = 4096, kPidsOffset = 256;
constexpr uint32_t kAbortedByOwner = 1, kAbortedByWorker = 16;
constexpr int kSpins = 400;            // about 10 us
constexpr int kYields = 200;
constexpr double kLongYieldS = 50e-6;  // another process wants this CPU, possibly the rank we wait for
constexpr long kSliceNs = 20'000'000;  // between checks of the abort word and the peers
constexpr size_t kShareBytes = 64 << 10;  // longer sums are split between the ranks (reduce-scatter, all-gather)
constexpr size_t kRingPiece = 256 << 10;  // lets the reader start before the writer ends
constexpr uint64_t kMessageMark = 0x5452494d00000000;

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool reached(const Flag& flag, uint32_t target) {
  return static_cast<int32_t>(flag.value.load(std::memory_order_acquire) - target) >= 0;
}

void raise_flag(Flag& flag, uint32_t value) {
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.waiters.load(std::memory_order_seq_cst) != 0) {
    syscall(SYS_futex, &flag.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

int usable_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

size_t share_start(size_t count, int rank, int ranks) {
  return count * static_cast<size_t>(rank) / static_cast<size_t>(ranks) / 16 * 16;
}
size_t share_end(size_t count, int rank, int ranks) {
  return rank + 1 == ranks ? count : share_start(count, rank + 1, ranks);
}

}  // namespace

// ---------------------------------------------------------------- setup and teardown

Comm::Comm(const std::string& path, int tp_rank, int pp_rank, double timeout_s, double step_timeout_s)
    : rank_(tp_rank), stage_(pp_rank), timeout_s_(timeout_s), step_timeout_s_(step_timeout_s) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw CommError("cannot open the arena " + path + ": " + std::strerror(errno));
  struct stat facts {};
  fstat(fd, &facts);
  total_ = static_cast<size_t>(facts.st_size);
  void* mapped = total_ < kPage ? MAP_FAILED : mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) throw CommError("cannot map the arena " + path);
  base_ = static_cast<char*>(mapped);
  header_ = reinterpret_cast<ArenaHeader*>(base_);
  pids_ = reinterpret_cast<std::atomic<uint32_t>*>(base_ + kPidsOffset);
  tp_ = static_cast<int>(header_->tp);
  pp_ = static_cast<int>(header_->pp);
  const bool is_ours = header_->magic == kMagic && header_->version == kVersion && header_->total == total_;
  if (!is_ours || tp_rank < 0 || tp_rank >= tp_ || pp_rank < 0 || pp_rank >= pp_) {
    munmap(base_, total_);
    throw CommError("the arena " + path + " was not made for this program, or not for this place in the mesh");
  }
  may_spin_ = usable_cpus() >= tp_ * pp_;
  pidfds_.assign(static_cast<size_t>(tp_ * pp_), -1);
  pids_[worker_at(stage_, rank_)].store(static_cast<uint32_t>(getpid()));
  const auto ring_at = [&](int stage) {
    char* start = base_ + header_->rings_offset + static_cast<size_t>(worker_at(stage, rank_)) * (kPage + header_->ring_bytes);
    Flag* flags = reinterpret_cast<Flag*>(start);
    return Ring{flags, flags + 1, start + kPage, 0};
  };
  if (stage_ + 1 < pp_) next_ = ring_at(stage_);
  if (stage_ > 0) prev_ = ring_at(stage_ - 1);
}

Comm::~Comm() {
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
  munmap(base_, total_);
}

void Comm::abort() {
  uint32_t none = 0;
  header_->abort.compare_exchange_strong(none, kAbortedByWorker + static_cast<uint32_t>(worker_at(stage_, rank_)));
}

Flag& Comm::arrived(int rank) const {
  char* group = base_ + kPage + static_cast<size_t>(stage_) * header_->group_bytes;
  return reinterpret_cast<Flag*>(group)[rank];
}

char* Comm::slot(int rank) const {
  const size_t flags = (static_cast<size_t>(tp_) * sizeof(Flag) + kPage - 1) / kPage * kPage;
  char* group = base_ + kPage + static_cast<size_t>(stage_) * header_->group_bytes;
  return group + flags + (2 * static_cast<size_t>(rank) + operation_ % 2) * header_->slot_bytes;
}

// ---------------------------------------------------------------- waiting

void Comm::fail(const std::string& message) {
  abort();
  throw CommError(message);
}

void Comm::check_abort(const char* what) const {
  const uint32_t code = header_->abort.load(std::memory_order_relaxed);
  if (code == 0) return;
  if (code == kAbortedByOwner) throw CommError(std::string(what) + ": aborted by the engine core");
  throw CommError(std::string(what) + ": aborted by worker " + std::to_string(code - kAbortedByWorker));
}

// A peer that has not joined yet is not dead.
bool Comm::is_dead(int peer) {
  int& fd = pidfds_[static_cast<size_t>(peer)];
  const uint32_t pid = pids_[peer].load();
  if (pid == 0) return false;
  if (fd < 0) {
    fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
    if (fd < 0) return errno == ESRCH || (kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH);
  }
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

// Sleeps one slice; true once the flag is set. Throws on abort, peer death and time-out.
bool Comm::sleep_until(Flag& flag, uint32_t target, int peer, double deadline, const char* what) {
  flag.waiters.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = flag.value.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - target) < 0) {
    const timespec slice{0, kSliceNs};
    syscall(SYS_futex, &flag.value, FUTEX_WAIT, seen, &slice, nullptr, 0);
  }
  flag.waiters.fetch_sub(1, std::memory_order_seq_cst);
  if (reached(flag, target)) return true;
  check_abort(what);
  const std::string name = "worker " + std::to_string(peer) + " (pid " + std::to_string(pids_[peer].load()) + ")";
  if (is_dead(peer) && !reached(flag, target)) fail(std::string(what) + ": " + name + " died");
  if (now_s() > deadline) fail(std::string(what) + ": " + name + " did not come in time");
  return reached(flag, target);
}

void Comm::wait(Flag& flag, uint32_t target, int peer, double timeout_s, const char* what) {
  if (may_spin_) {
    for (int i = 0; i < kSpins; ++i) {
      if (reached(flag, target)) return;
      relax();
    }
  }
  double before = now_s();
  for (int i = 0; i < kYields; ++i) {
    if (reached(flag, target)) return;
    sched_yield();
    const double now = now_s();
    if (now - before > kLongYieldS) break;
    before = now;
  }
  check_abort(what);
  const double deadline = now_s() + timeout_s;
  while (!sleep_until(flag, target, peer, deadline, what)) {
  }
}

void Comm::arrive_and_wait(const char* what) {
  ++sequence_;
  raise_flag(arrived(rank_), sequence_);
  for (int i = 1; i < tp_; ++i) {
    const int rank = (rank_ + i) % tp_;
    wait(arrived(rank), sequence_, worker_at(stage_, rank), timeout_s_, what);
  }
}

// ---------------------------------------------------------------- within a stage

void Comm::all_reduce(float* x, size_t count) {
  if (tp_ == 1) return;
  check_abort("all_reduce");
  const size_t most = header_->slot_bytes / sizeof(float);
  for (size_t done = 0; done < count; done += most) {
    const size_t piece = std::min(most, count - done);
    begin();
    if (tp_ > 2 && piece * sizeof(float) > kShareBytes) {
      reduce_in_shares(x + done, piece);
    } else {
      reduce_once(x + done, piece);
    }
  }
}

namespace {

// out[i] = rows[0][i] + rows[1][i] + ..., in this order.
void sum_rows(const float* const* rows, int num_rows, float* out, size_t first, size_t last) {
  for (size_t i = first; i < last; ++i) out[i] = rows[0][i] + rows[1][i];
  for (int r = 2; r < num_rows; ++r) {
    for (size_t i = first; i < last; ++i) out[i] += rows[r][i];
  }
}

}  // namespace

void Comm::reduce_once(float* x, size_t count) {
  std::memcpy(slot(rank_), x, count * sizeof(float));
  arrive_and_wait("all_reduce");
  const float* rows[64];
  if (tp_ > 64) fail("all_reduce: more than 64 ranks in a stage");
  for (int r = 0; r < tp_; ++r) rows[r] = reinterpret_cast<const float*>(slot(r));
  sum_rows(rows, tp_, x, 0, count);
}

// Each rank sums one share into that part of its own slot, which no other rank has read yet.
void Comm::reduce_in_shares(float* x, size_t count) {
  std::memcpy(slot(rank_), x, count * sizeof(float));
  arrive_and_wait("all_reduce");
  const size_t first = share_start(count, rank_, tp_), last = share_end(count, rank_, tp_);
  const float* rows[64];
  if (tp_ > 64) fail("all_reduce: more than 64 ranks in a stage");
  for (int r = 0; r < tp_; ++r) rows[r] = reinterpret_cast<const float*>(slot(r));
  sum_rows(rows, tp_, x, first, last);
  std::memcpy(slot(rank_) + first * sizeof(float), x + first, (last - first) * sizeof(float));
  arrive_and_wait("all_reduce");
  for (int r = 0; r < tp_; ++r) {
    const size_t start = share_start(count, r, tp_), stop = share_end(count, r, tp_);
    std::memcpy(x + start, slot(r) + start * sizeof(float), (stop - start) * sizeof(float));
  }
}

void Comm::all_gather(const char* x, char* out, size_t rows, const std::vector<size_t>& sizes) {
  check_abort("all_gather");
  size_t width = 0, widest = 0;
  std::vector<size_t> columns;
  for (size_t size : sizes) {
    columns.push_back(width);
    width += size;
    widest = std::max(widest, size);
  }
  const size_t most = header_->slot_bytes;
  const size_t own = rows * sizes[static_cast<size_t>(rank_)];
  for (size_t done = 0; done < rows * widest; done += most) {
    begin();
    if (done < own) std::memcpy(slot(rank_), x + done, std::min(most, own - done));
    arrive_and_wait("all_gather");
    for (int r = 0; r < tp_; ++r) {
      const size_t size = sizes[static_cast<size_t>(r)], stop = std::min(done + most, rows * size);
      for (size_t at = done; at < stop;) {
        const size_t row = at / size, column = at % size, n = std::min(size - column, stop - at);
        std::memcpy(out + row * width + columns[static_cast<size_t>(r)] + column, slot(r) + (at - done), n);
        at += n;
      }
    }
  }
}

void Comm::reduce_scatter(const float* x, float* out, size_t rows, const std::vector<size_t>& sizes) {
  check_abort("reduce_scatter");
  size_t width = 0, column = 0;
  for (int r = 0; r < tp_; ++r) {
    if (r == rank_) column = width;
    width += sizes[static_cast<size_t>(r)];
  }
  const size_t own = sizes[static_cast<size_t>(rank_)];
  const size_t most = header_->slot_bytes / sizeof(float), count = rows * width;
  for (size_t done = 0; done < count; done += most) {
    const size_t piece = std::min(most, count - done);
    begin();
    std::memcpy(slot(rank_), x + done, piece * sizeof(float));
    arrive_and_wait("reduce_scatter");
    for (size_t row = done / width; row * width < done + piece; ++row) {
      const size_t first = std::max(row * width + column, done), last = std::min(row * width + column + own, done + piece);
      for (size_t at = first; at < last; ++at) {
        float sum = 0.0f;
        for (int r = 0; r < tp_; ++r) {
          const float value = reinterpret_cast<const float*>(slot(r))[at - done];
          sum = r == 0 ? value : sum + value;
        }
        out[row * own + (at - row * width - column)] = sum;
      }
    }
  }
}

void Comm::broadcast(char* x, size_t bytes, int root) {
  check_abort("broadcast");
  const size_t most = header_->slot_bytes;
  for (size_t done = 0; done < bytes; done += most) {
    const size_t piece = std::min(most, bytes - done);
    begin();
    if (rank_ == root) std::memcpy(slot(root), x + done, piece);
    arrive_and_wait("broadcast");
    if (rank_ != root) std::memcpy(x + done, slot(root), piece);
  }
}

void Comm::barrier() {
  check_abort("barrier");
  begin();
  arrive_and_wait("barrier");
}

// ---------------------------------------------------------------- between stages

void Comm::ring_write(const char* x, size_t bytes) {
  const uint64_t size = header_->ring_bytes;
  for (size_t done = 0; done < bytes;) {
    const uint32_t sent = static_cast<uint32_t>(next_.position);
    uint32_t under_way = sent - next_.read->value.load(std::memory_order_acquire);
    if (under_way == size) {
      wait(*next_.read, sent - static_cast<uint32_t>(size) + 1, worker_at(stage_ + 1, rank_), step_timeout_s_, "send_next");
      continue;
    }
    const uint64_t at = next_.position % size;
    const size_t n = std::min({bytes - done, size - at, size - under_way, kRingPiece});
    std::memcpy(next_.data + at, x + done, n);
    done += n;
    next_.position += n;
    raise_flag(*next_.written, static_cast<uint32_t>(next_.position));
  }
}

void Comm::ring_read(char* x, size_t bytes) {
  const uint64_t size = header_->ring_bytes;
  for (size_t done = 0; done < bytes;) {
    const uint32_t got = static_cast<uint32_t>(prev_.position);
    const uint32_t ready = prev_.written->value.load(std::memory_order_acquire) - got;
    if (ready == 0) {
      wait(*prev_.written, got + 1, worker_at(stage_ - 1, rank_), step_timeout_s_, "recv_prev");
      continue;
    }
    const uint64_t at = prev_.position % size;
    const size_t n = std::min({bytes - done, size - at, static_cast<uint64_t>(ready)});
    std::memcpy(x + done, prev_.data + at, n);
    done += n;
    prev_.position += n;
    raise_flag(*prev_.read, static_cast<uint32_t>(prev_.position));
  }
}

void Comm::send_next(const char* x, size_t bytes) {
  check_abort("send_next");
  if (next_.data == nullptr) fail("send_next: this is the last stage");
  const uint64_t head[2] = {kMessageMark, bytes};
  ring_write(reinterpret_cast<const char*>(head), sizeof(head));
  ring_write(x, bytes);
}

void Comm::recv_prev(char* x, size_t bytes) {
  check_abort("recv_prev");
  if (prev_.data == nullptr) fail("recv_prev: this is the first stage");
  uint64_t head[2];
  ring_read(reinterpret_cast<char*>(head), sizeof(head));
  if (head[0] != kMessageMark || head[1] != bytes) {
    fail("recv_prev: " + std::to_string(bytes) + " bytes expected, the previous stage sent " + std::to_string(head[1]));
  }
  ring_read(x, bytes);
}

}  // namespace trireme
