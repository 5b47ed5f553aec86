// Detection behind cpuinfo.h. The compiler's cpuid helpers also check that the operating system saves the registers.
#include "cpuinfo.h"

#include <atomic>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace trireme {
namespace {

#if defined(__x86_64__)
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return Isa::portable;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    return Isa::avx512vnni;
  }
  return Isa::avx2;
#else
  return Isa::portable;
#endif
}

std::atomic<Isa> current{best_isa()};

}  // namespace

Isa best_isa() {
  static const Isa best = detect();
  return best;
}

Isa isa() { return current.load(std::memory_order_relaxed); }

void set_isa(Isa value) {
  if (value > best_isa()) {
    throw std::invalid_argument(std::string("this machine has no ") + isa_name(value) + "; best is " + isa_name(best_isa()));
  }
  current.store(value, std::memory_order_relaxed);
}

const char* isa_name(Isa value) {
  switch (value) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avx512vnni: return "avx512vnni";
  }
  return "unknown";
}

Isa isa_from_name(const std::string& name) {
  for (Isa value : {Isa::portable, Isa::avx2, Isa::avx512vnni}) {
    if (name == isa_name(value)) return value;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; known: portable, avx2, avx512vnni");
}

}  // namespace trireme
