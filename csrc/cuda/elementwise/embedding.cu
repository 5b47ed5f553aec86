// Row lookup and block copies.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

template <class T>
__global__ void gather_kernel(const T* table, const int32_t* ids, T* out, int hidden, int first, int count, float scale) {
  constexpr int size = Pack<T>::size;
  pdl_wait();
  pdl_launch_dependents();
  const int64_t token = blockIdx.x;
  const int id = ids[token] - first;
  for (int at = threadIdx.x * size; at < hidden; at += blockDim.x * size) {
    Pack<T> value;
    if (id >= 0 && id < count) {
      value = load_pack(table + static_cast<int64_t>(id) * hidden + at);
      if (scale != 1.0f) {
#pragma unroll
        for (int i = 0; i < size; ++i) value.v[i] = from_float<T>(to_float(value.v[i]) * scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < size; ++i) value.v[i] = from_float<T>(0.0f);
    }
    store_pack(out + token * hidden + at, value);
  }
}

__global__ void copy_blocks_kernel(uint4* cache, const int32_t* pairs, int64_t block_packs) {
  pdl_wait();
  pdl_launch_dependents();
  const uint4* from = cache + pairs[2 * blockIdx.x] * block_packs;
  uint4* to = cache + pairs[2 * blockIdx.x + 1] * block_packs;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x;
  for (int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < block_packs; i += step) to[i] = from[i];
}

}  // namespace

void gather_rows(const void* table, const int32_t* ids, void* out, int tokens, int hidden, int first, int count, float scale, Type type,
                 Stream stream) {
  if (tokens < 1) return;
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    need_packs<T>("gather_rows", hidden);
    launch(gather_kernel<T>, dim3(tokens), dim3(256), 0, stream, static_cast<const T*>(table), ids, static_cast<T*>(out), hidden, first, count,
           scale);
  });
}

void copy_blocks(void* cache, const int32_t* pairs, int count, int64_t block_bytes, Stream stream) {
  if (count < 1) return;
  if (block_bytes % 16 != 0) {
    throw std::invalid_argument("copy_blocks takes blocks of a multiple of 16 bytes; got " + std::to_string(block_bytes));
  }
  const int64_t packs = block_bytes / 16, parts = (packs + 255) / 256;
  const dim3 grid(count, static_cast<unsigned>(parts < 16 ? parts : 16));
  launch(copy_blocks_kernel, grid, dim3(256), 0, stream, static_cast<uint4*>(cache), pairs, packs);
}

}  // namespace trireme::cuda
