// Collectives between the GPUs of one host over memory that they map into each other (CUDA IPC). Called by bind/cuda_allreduce.cpp.
//
// Every rank makes the same calls in the same order, each on one stream. Calls only launch kernels, allocate nothing and can be
// captured in a graph: per-call state is counted on the device. No kernel waits forever: if a peer misses the deadline, or on abort(),
// this call and all later ones end with undefined results, and status() reports it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/ops.h"

namespace trireme::cuda {

constexpr int kMaxPeers = 8;

enum class Way {
  pushed = 0,    // 8 bytes and a flag travel together: lowest latency, twice the bytes
  one_shot = 1,  // every rank reads all data of all ranks
  two_shot = 2,  // every rank sums one part and reads the sums of the others
};

enum class PeerStatus : uint32_t { sound = 0, aborted = 1, timed_out = 2 };

// The group as the kernels see it.
struct PeerView {
  char* region[kMaxPeers];  // of each rank, as mapped here
  uint32_t* status;         // in host memory
  uint64_t deadline_ns;
  int rank, size;
  int64_t pushed_bytes;     // maximum payload of one pushed message
  int64_t staged_bytes;     // maximum size of one staged message
};

class Peers {
 public:
  // Allocates this rank's region on the current device for messages of at most pushed_bytes and staged_bytes.
  Peers(int rank, int size, int64_t pushed_bytes, int64_t staged_bytes, double deadline_s);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  std::string handle() const;
  // Maps the other ranks' regions; handles[rank] is the result of that rank's handle().
  void open(const std::vector<std::string>& handles);

  // out = the sum over ranks in rank order, added in float32 and rounded once. 16 divides the bytes; out may be x.
  void all_reduce(const void* x, void* out, int64_t count, Type type, Way way, Stream stream);
  // All-gather: out [rows, sum of row_bytes] from the ranks' x [rows, row_bytes[rank]]. 2 divides row_bytes.
  void all_gather(const void* x, void* out, int64_t rows, const std::vector<int64_t>& row_bytes, Stream stream);

  void abort();
  PeerStatus status() const;

 private:
  void need_open() const;

  PeerView view_{};
  void* own_ = nullptr;
  uint32_t* status_ = nullptr;
  bool is_open_ = false;
};

}  // namespace trireme::cuda
