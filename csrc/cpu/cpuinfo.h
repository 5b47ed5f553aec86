// The instruction set of the kernels: detected once at start, overridable for tests. Kernel files ask isa() per call.
#pragma once

#include <string>

namespace trireme {

// avx2: AVX2 + FMA + F16C. avxvnni: AVX-VNNI on top of that. avx512vnni: AVX-512 F + BW + VL + DQ + VNNI on top of AVX2. amx: int8
// tiles on top of avx512vnni, with the system's permission to use them.
enum class Isa { portable = 0, avx2 = 1, avxvnni = 2, avx512vnni = 3, amx = 4 };

// Indexed by enum Isa.
inline constexpr const char* kIsaNames[] = {"portable", "avx2", "avxvnni", "avx512vnni", "amx"};
inline constexpr int kNumIsas = 5;

// The first call requests AMX tiles from the system (Linux grants them on request).
bool has_isa(Isa value);

// The best set that this machine supports.
Isa best_isa();

// The set in use: unless set_isa was called, the best one except AMX.
Isa isa();

// Throws std::invalid_argument if this machine lacks it. For tests; not while kernels run.
void set_isa(Isa value);

const char* isa_name(Isa value);

// The level that kernels without byte dot products distinguish.
enum class Vectors { portable, avx2, avx512 };
Vectors vectors();

// Throws std::invalid_argument on an unknown name.
Isa isa_from_name(const std::string& name);

}  // namespace trireme
