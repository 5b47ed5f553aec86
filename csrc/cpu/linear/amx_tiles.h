// AMX instructions as functions that the compiler may not move: its intrinsics do not declare the memory they read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trireme {
namespace {

#define INLINE inline __attribute__((always_inline))

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

INLINE void tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int tile>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile>
INLINE void tile_load(const void* p, ptrdiff_t row_step) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_step), "i"(tile) : "memory");
}

template <int tile>
INLINE void tile_store(void* p, ptrdiff_t row_step) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_step), "i"(tile) : "memory");
}

// sums [16 rows][16] += a [16 rows][4 * quads] of signed bytes times b [quads][16][4] of signed bytes.
template <int sums, int a, int b>
INLINE void tile_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

}  // namespace
}  // namespace trireme
