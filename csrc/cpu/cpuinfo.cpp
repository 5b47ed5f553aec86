// Detection behind cpuinfo.h. The compiler's cpuid helpers also check that the operating system saves the registers; for AMX
// tiles, which not all of them know, that is done here.
#include "cpu/cpuinfo.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trireme {
namespace {

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned sub_leaf) {
  Registers r;
  if (__get_cpuid_count(leaf, sub_leaf, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

bool has_avx2() {
  const bool has_f16c = (cpuid(1, 0).c & bit_F16C) != 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
}

bool has_avx512vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

// Linux enables the tile state on request only: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool may_use_tiles() {
  constexpr unsigned kTileStates = 3u << 17, kInt8 = 1u << 25, kTiles = 1u << 24;
  const unsigned features = cpuid(7, 0).d;
  if ((features & kInt8) == 0 || (features & kTiles) == 0 || (cpuid(1, 0).c & bit_OSXSAVE) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileStates) != kTileStates) return false;
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}
#endif

unsigned detect() {
  unsigned found = 1u << static_cast<int>(Isa::portable);
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!has_avx2()) return found;
  found |= 1u << static_cast<int>(Isa::avx2);
  if ((cpuid(7, 1).a & 1u << 4) != 0) found |= 1u << static_cast<int>(Isa::avxvnni);
  if (!has_avx512vnni()) return found;
  found |= 1u << static_cast<int>(Isa::avx512vnni);
  if (may_use_tiles()) found |= 1u << static_cast<int>(Isa::amx);
#endif
  return found;
}

// Tiles are opt-in. Sapphire Rapids, 2 threads, M of 32 to 128, medians: a tenth faster than byte dot products with Q3_K,
// IQ4_NL and MXFP4, as fast with Q8_0, Q4_K and IQ4_XS, slower with the rest (Q6_K by a quarter).
Isa usual_isa() { return best_isa() == Isa::amx ? Isa::avx512vnni : best_isa(); }

std::atomic<Isa> current{usual_isa()};

}  // namespace

bool has_isa(Isa value) {
  static const unsigned found = detect();
  return (found >> static_cast<int>(value) & 1) != 0;
}

Isa best_isa() {
  for (int i = kNumIsas - 1; i > 0; --i) {
    if (has_isa(static_cast<Isa>(i))) return static_cast<Isa>(i);
  }
  return Isa::portable;
}

Isa isa() { return current.load(std::memory_order_relaxed); }

void set_isa(Isa value) {
  if (!has_isa(value)) {
    throw std::invalid_argument(std::string("this machine has no ") + isa_name(value) + "; best is " + isa_name(best_isa()));
  }
  current.store(value, std::memory_order_relaxed);
}

const char* isa_name(Isa value) { return kIsaNames[static_cast<int>(value)]; }

Vectors vectors() {
  const Isa value = isa();
  return value >= Isa::avx512vnni ? Vectors::avx512 : value >= Isa::avx2 ? Vectors::avx2 : Vectors::portable;
}

Isa isa_from_name(const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumIsas; ++i) {
    if (name == kIsaNames[i]) return static_cast<Isa>(i);
    known += std::string(i == 0 ? "" : ", ") + kIsaNames[i];
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; known: " + known);
}

}  // namespace trireme
