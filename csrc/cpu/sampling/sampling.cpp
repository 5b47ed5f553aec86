// Distributes the sequences of a sampling call over the threads of the pool, each with its own scratch.
#include "cpu/sampling/sampling.h"

#include <vector>

#include "cpu/cpuinfo.h"
#include "cpu/threads.h"

namespace trireme {
namespace {

class ScratchMemory {
 public:
  SampleScratch fit(int vocab) {
    const size_t size = (static_cast<size_t>(vocab) + 511) / 256 * 256;
    if (words_.size() < 6 * size) words_.resize(6 * size);
    uint32_t* start = words_.data();
    return SampleScratch{reinterpret_cast<float*>(start),            reinterpret_cast<float*>(start + size),
                         reinterpret_cast<float*>(start + 2 * size), reinterpret_cast<int32_t*>(start + 3 * size),
                         start + 4 * size,                           reinterpret_cast<int32_t*>(start + 5 * size)};
  }

 private:
  std::vector<uint32_t> words_;
};

thread_local ScratchMemory memory;

const SampleKernels& kernels() {
#if defined(__x86_64__)
  switch (vectors()) {
    case Vectors::avx512: return sample_kernels_avx512();
    case Vectors::avx2: return sample_kernels_avx2();
    case Vectors::portable: break;
  }
#endif
  return sample_kernels_portable();
}

uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t noise_key(uint64_t seed, int choice, int position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  uint64_t key = mix64(seed + kGolden);
  key = mix64(key + kGolden * (static_cast<uint64_t>(choice) + 1));
  return mix64(key + kGolden * (static_cast<uint64_t>(position) + 1));
}

void sample_rows(const SampleArgs& a) {
  const SampleKernels& chosen = kernels();
  parallel(a.rows, [&](int row, int) { chosen.sample_row(a, row, memory.fit(a.vocab)); });
}

void logprob_rows(const LogprobArgs& a) {
  const SampleKernels& chosen = kernels();
  parallel(a.rows, [&](int row, int) { chosen.logprob_row(a, row, memory.fit(a.vocab)); });
}

int race(const float* logits, int size, float peak, double temperature, uint64_t key) {
  return kernels().race(logits, size, peak, temperature, key);
}

}  // namespace trireme
