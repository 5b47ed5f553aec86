// See allreduce.h. A region holds counters, flags, an inbox for pushed messages and a stage from which peers read. Inbox and stage are
// double-buffered: before a rank rewrites one, it has finished the call in between, which received a flag from every peer that had
// finished the call before it.
#include "cuda/device.cuh"
#include "cuda/comm/allreduce.h"

#include <algorithm>
#include <cstring>

namespace trireme::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPushThreads = 256;
constexpr int kMaxBlocks = 64;
constexpr uint32_t kLook = 4096;  // polls (about 2 ms) between checks of the clock and of the status word in host memory, which is slow to read
constexpr int64_t kPack = 16;

struct Counter {
  uint32_t calls, ended;  // calls so far; CTAs that have finished the current one
};

struct Header {
  Counter pushed, staged;
  uint32_t arrived[2][kMaxBlocks][kMaxPeers];  // by barrier of a call, CTA, and arriving rank
};

// ---------------------------------------------------------------- region layout

constexpr int64_t kHeaderBytes = 8192;
static_assert(sizeof(Header) <= kHeaderBytes);

__host__ __device__ int64_t inbox_bytes(const PeerView& v) { return 2 * v.pushed_bytes; }  // of one message with its flags
__host__ __device__ int64_t stage_offset(const PeerView& v) { return kHeaderBytes + 2 * v.size * inbox_bytes(v); }
// Two stages, then two buffers for the sums of two_shot.
__host__ __device__ int64_t region_bytes(const PeerView& v) { return stage_offset(v) + 4 * v.staged_bytes; }

__device__ Header* header(const PeerView& v, int rank) { return reinterpret_cast<Header*>(v.region[rank]); }
__device__ char* inbox(const PeerView& v, int owner, uint32_t call, int from) {
  return v.region[owner] + kHeaderBytes + ((call & 1) * v.size + from) * inbox_bytes(v);
}
__device__ char* stage(const PeerView& v, int owner, uint32_t call) { return v.region[owner] + stage_offset(v) + (call & 1) * v.staged_bytes; }
__device__ char* sums(const PeerView& v, int owner, uint32_t call) { return stage(v, owner, call) + 2 * v.staged_bytes; }

// ---------------------------------------------------------------- waiting, with a deadline

__device__ uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

struct Patience {
  uint64_t since = 0;
  uint32_t turns = 0;

  __device__ bool is_over(const PeerView& v) {
    if (++turns % kLook != 0) return false;
    volatile uint32_t* status = v.status;
    if (*status != static_cast<uint32_t>(PeerStatus::sound)) return true;
    const uint64_t now = now_ns();
    if (since == 0) since = now;
    if (now - since < v.deadline_ns) return false;
    *status = static_cast<uint32_t>(PeerStatus::timed_out);
    __threadfence_system();
    return true;
  }
};

__device__ void store_release(uint32_t* p, uint32_t value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory"); }
__device__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// Barrier over all ranks' CTAs with this index; their earlier writes are visible afterwards.
__device__ void meet(const PeerView& v, uint32_t call, int barrier) {
  __syncthreads();
  const int peer = threadIdx.x;
  if (peer < v.size && peer != v.rank) {
    store_release(&header(v, peer)->arrived[barrier][blockIdx.x][v.rank], call);
    const uint32_t* flag = &header(v, v.rank)->arrived[barrier][blockIdx.x][peer];
    Patience patience;
    while (static_cast<int32_t>(load_acquire(flag) - call) < 0 && !patience.is_over(v)) {
    }
  }
  __syncthreads();
}

__device__ uint32_t this_call(const Counter& counter) { return *const_cast<const volatile uint32_t*>(&counter.calls) + 1; }

// The last CTA to finish counts the call.
__device__ void end_call(Counter& counter, uint32_t call) {
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(&counter.ended, 1) != gridDim.x - 1) return;
  counter.ended = 0;
  counter.calls = call;
}

// ---------------------------------------------------------------- sums

template <class T>
__device__ void add_to(float* sum, const T* values, int count) {
#pragma unroll
  for (int i = 0; i < count; ++i) sum[i] += to_float(values[i]);
}

template <class T>
struct alignas(8) Half {  // the payload of one pushed word pair
  static constexpr int size = 8 / sizeof(T);
  T v[size];
};

__device__ void push(char* to, uint64_t payload, uint32_t mark) {
  const uint64_t low = (payload & 0xffffffffull) | static_cast<uint64_t>(mark) << 32, high = payload >> 32 | static_cast<uint64_t>(mark) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high) : "memory");
}

__device__ uint64_t take(const PeerView& v, const char* from, uint32_t mark, Patience& patience) {
  uint64_t low, high;
  do {
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
  } while ((static_cast<uint32_t>(low >> 32) != mark || static_cast<uint32_t>(high >> 32) != mark) && !patience.is_over(v));
  return (low & 0xffffffffull) | high << 32;
}

template <class T>
__global__ void __launch_bounds__(kPushThreads) reduce_pushed(PeerView v, const T* x, T* out, int64_t halves) {
  pdl_wait();
  Counter& counter = header(v, v.rank)->pushed;
  const uint32_t call = this_call(counter);
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const auto* in = reinterpret_cast<const uint64_t*>(x);
  for (int64_t i = first; i < halves; i += step) {
    const uint64_t own = in[i];
    for (int peer = 0; peer < v.size; ++peer) {
      if (peer != v.rank) push(inbox(v, peer, call, v.rank) + i * kPack, own, call);
    }
  }
  pdl_launch_dependents();
  Patience patience;
  for (int64_t i = first; i < halves; i += step) {
    float sum[Half<T>::size] = {};
    for (int rank = 0; rank < v.size; ++rank) {
      const uint64_t bits = rank == v.rank ? in[i] : take(v, inbox(v, v.rank, call, rank) + i * kPack, call, patience);
      Half<T> part;
      memcpy(&part, &bits, sizeof(bits));
      add_to(sum, part.v, Half<T>::size);
    }
    Half<T> total;
#pragma unroll
    for (int j = 0; j < Half<T>::size; ++j) total.v[j] = from_float<T>(sum[j]);
    reinterpret_cast<Half<T>*>(out)[i] = total;
  }
  end_call(counter, call);
}

template <class T>
__device__ Pack<T> sum_of(const PeerView& v, uint32_t call, int64_t at) {
  float sum[Pack<T>::size] = {};
  for (int rank = 0; rank < v.size; ++rank) add_to(sum, load_pack(reinterpret_cast<const T*>(stage(v, rank, call)) + at).v, Pack<T>::size);
  Pack<T> total;
#pragma unroll
  for (int j = 0; j < Pack<T>::size; ++j) total.v[j] = from_float<T>(sum[j]);
  return total;
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_one_shot(PeerView v, const T* x, T* out, int64_t packs) {
  pdl_wait();
  Counter& counter = header(v, v.rank)->staged;
  const uint32_t call = this_call(counter);
  constexpr int64_t n = Pack<T>::size;
  const int64_t chunk = (packs + gridDim.x - 1) / gridDim.x, first = blockIdx.x * chunk, last = min(packs, first + chunk);
  T* own = reinterpret_cast<T*>(stage(v, v.rank, call));
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) store_pack(own + i * n, load_pack(x + i * n));
  meet(v, call, 0);
  pdl_launch_dependents();
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) store_pack(out + i * n, sum_of<T>(v, call, i * n));
  end_call(counter, call);
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_two_shot(PeerView v, const T* x, T* out, int64_t packs) {
  pdl_wait();
  Counter& counter = header(v, v.rank)->staged;
  const uint32_t call = this_call(counter);
  constexpr int64_t n = Pack<T>::size;
  const int64_t part = (packs + v.size - 1) / v.size, chunk = (part + gridDim.x - 1) / gridDim.x;
  const int64_t from = blockIdx.x * chunk, to = min(part, from + chunk);  // of each part
  T* own = reinterpret_cast<T*>(stage(v, v.rank, call));
  for (int rank = 0; rank < v.size; ++rank) {
    const int64_t last = min(packs, rank * part + to);
    for (int64_t i = rank * part + from + threadIdx.x; i < last; i += blockDim.x) store_pack(own + i * n, load_pack(x + i * n));
  }
  meet(v, call, 0);
  T* summed = reinterpret_cast<T*>(sums(v, v.rank, call));
  const int64_t end = min(packs, v.rank * part + to);
  for (int64_t i = v.rank * part + from + threadIdx.x; i < end; i += blockDim.x) store_pack(summed + i * n, sum_of<T>(v, call, i * n));
  meet(v, call, 1);
  pdl_launch_dependents();
  for (int rank = 0; rank < v.size; ++rank) {
    const T* theirs = reinterpret_cast<const T*>(sums(v, rank, call));
    const int64_t last = min(packs, rank * part + to);
    for (int64_t i = rank * part + from + threadIdx.x; i < last; i += blockDim.x) store_pack(out + i * n, load_pack(theirs + i * n));
  }
  end_call(counter, call);
}

// ---------------------------------------------------------------- all-gather

struct Widths {
  int64_t start[kMaxPeers + 1];  // in units of U
};

template <class U>
__global__ void __launch_bounds__(kThreads) gather_columns(PeerView v, const U* x, U* out, int64_t rows, Widths widths) {
  pdl_wait();
  Counter& counter = header(v, v.rank)->staged;
  const uint32_t call = this_call(counter);
  const auto width = [&](int rank) { return widths.start[rank + 1] - widths.start[rank]; };
  const auto span = [&](int rank, int64_t& first, int64_t& last) {
    const int64_t all = rows * width(rank), chunk = (all + gridDim.x - 1) / gridDim.x;
    first = blockIdx.x * chunk;
    last = min(all, first + chunk);
  };
  int64_t first, last;
  span(v.rank, first, last);
  U* own = reinterpret_cast<U*>(stage(v, v.rank, call));
  for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) own[i] = x[i];
  meet(v, call, 0);
  pdl_launch_dependents();
  for (int rank = 0; rank < v.size; ++rank) {
    span(rank, first, last);
    const U* theirs = rank == v.rank ? x : reinterpret_cast<const U*>(stage(v, rank, call));
    const int64_t columns = width(rank), total = widths.start[v.size];
#pragma unroll 4
    for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
      const int64_t row = i / columns;
      out[row * total + widths.start[rank] + (i - row * columns)] = theirs[i];
    }
  }
  end_call(counter, call);
}

// ---------------------------------------------------------------- launches

int blocks_for(int64_t items, int threads) { return static_cast<int>(std::clamp<int64_t>((items + threads - 1) / threads, 1, kMaxBlocks)); }

void need(bool is_so, const std::string& what) {
  if (!is_so) throw std::invalid_argument(what);
}

}  // namespace

Peers::Peers(int rank, int size, int64_t pushed_bytes, int64_t staged_bytes, double deadline_s) {
  need(size >= 1 && size <= kMaxPeers && rank >= 0 && rank < size, "a group has 1 to " + std::to_string(kMaxPeers) + " ranks");
  need(pushed_bytes % kPack == 0 && staged_bytes % kPack == 0 && pushed_bytes > 0 && staged_bytes > 0, "16 divides the sizes of a region");
  view_.rank = rank;
  view_.size = size;
  view_.pushed_bytes = pushed_bytes;
  view_.staged_bytes = staged_bytes;
  view_.deadline_ns = static_cast<uint64_t>(deadline_s * 1e9);
  check(cudaHostAlloc(reinterpret_cast<void**>(&status_), sizeof(*status_), cudaHostAllocMapped | cudaHostAllocPortable), "host memory");
  *status_ = 0;
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&view_.status), status_, 0), "host memory");
  check(cudaMalloc(&own_, static_cast<size_t>(region_bytes(view_))), "memory for collectives");
  check(cudaMemset(own_, 0, static_cast<size_t>(stage_offset(view_))), "memory for collectives");
  check(cudaDeviceSynchronize(), "memory for collectives");
  view_.region[rank] = static_cast<char*>(own_);
  is_open_ = size == 1;
}

Peers::~Peers() {
  for (int rank = 0; rank < view_.size; ++rank) {
    if (rank != view_.rank && view_.region[rank] != nullptr) cudaIpcCloseMemHandle(view_.region[rank]);
  }
  cudaFree(own_);
  cudaFreeHost(status_);
}

std::string Peers::handle() const {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, own_), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

void Peers::open(const std::vector<std::string>& handles) {
  need(static_cast<int>(handles.size()) == view_.size, "one handle for each rank is needed");
  for (int rank = 0; rank < view_.size; ++rank) {
    if (rank == view_.rank || view_.region[rank] != nullptr) continue;
    need(handles[rank].size() == sizeof(cudaIpcMemHandle_t), "this is no handle");
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, handles[rank].data(), sizeof(handle));
    void* mapped = nullptr;
    check(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    view_.region[rank] = static_cast<char*>(mapped);
  }
  is_open_ = true;
}

void Peers::need_open() const { need(is_open_, "the regions of the other ranks are not open yet"); }

void Peers::all_reduce(const void* x, void* out, int64_t count, Type type, Way way, Stream stream) {
  need_open();
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    const int64_t most = way == Way::pushed ? view_.pushed_bytes : view_.staged_bytes;
    need(bytes % kPack == 0, "16 divides the bytes of a sum; got " + std::to_string(bytes));
    need(bytes <= most, "this way takes " + std::to_string(most) + " bytes at once; got " + std::to_string(bytes));
    if (bytes == 0) return;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (way == Way::pushed) {
      const int64_t halves = bytes / 8;
      return launch(reduce_pushed<T>, blocks_for(halves, kPushThreads), kPushThreads, 0, stream, view_, from, to, halves);
    }
    const int64_t packs = bytes / kPack;
    const int blocks = blocks_for(way == Way::one_shot ? packs : packs / view_.size, kThreads);
    launch(way == Way::one_shot ? reduce_one_shot<T> : reduce_two_shot<T>, blocks, kThreads, 0, stream, view_, from, to, packs);
  });
}

void Peers::all_gather(const void* x, void* out, int64_t rows, const std::vector<int64_t>& row_bytes, Stream stream) {
  need_open();
  need(static_cast<int>(row_bytes.size()) == view_.size, "one width for each rank is needed");
  const int64_t widest = *std::max_element(row_bytes.begin(), row_bytes.end());
  need(rows * widest <= view_.staged_bytes, std::to_string(view_.staged_bytes) + " bytes can be gathered at once");
  if (rows == 0 || widest == 0) return;
  int64_t unit = kPack;
  while (unit > 1 && std::any_of(row_bytes.begin(), row_bytes.end(), [&](int64_t bytes) { return bytes % unit != 0; })) unit /= 2;
  Widths widths{};
  for (int rank = 0; rank < view_.size; ++rank) widths.start[rank + 1] = widths.start[rank] + row_bytes[rank] / unit;
  const auto gather = [&](auto zero) {
    using U = decltype(zero);
    const int blocks = blocks_for(rows * widest / unit, kThreads);
    launch(gather_columns<U>, blocks, kThreads, 0, stream, view_, static_cast<const U*>(x), static_cast<U*>(out), rows, widths);
  };
  switch (unit) {
    case 16: return gather(uint4{});
    case 8: return gather(uint64_t{});
    case 4: return gather(uint32_t{});
    case 2: return gather(uint16_t{});
    default: throw std::invalid_argument("2 divides the bytes of a row");
  }
}

void Peers::abort() {
  volatile uint32_t* status = status_;
  if (*status == 0) *status = static_cast<uint32_t>(PeerStatus::aborted);
}

PeerStatus Peers::status() const { return static_cast<PeerStatus>(*const_cast<const volatile uint32_t*>(status_)); }

}  // namespace trireme::cuda
