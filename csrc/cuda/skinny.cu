// Products of few rows of x with a large weight, bound by reading the weight once. Tensor cores do the arithmetic.
//
// A block owns 16 * NT outputs; its warps take turns over K in pieces of 64 and are summed at the end, always in the same
// order. Weights go from memory straight into the A fragments of mma.m16n8k16: a dot product may take its k's in any order
// as long as both sides agree, so a thread gives its 16 bytes (8 neighbouring k's of one row) to two steps as they come,
// and x (the B fragments, 8 columns to a tile) is read with the same assignment.
#include "cuda/device.cuh"

namespace trireme::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kPiece = 64;  // k's of one turn

__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<bf16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<f16>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One piece of the weights of a warp: per 16 outputs, rows g and g + 8, two times 16 bytes.
template <int NT>
struct Piece {
  uint4 v[NT][2][2];
};

template <class T, int NT>
__device__ __forceinline__ Piece<NT> load_piece(const T* const (&rows)[NT][2], int k) {
  Piece<NT> piece;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      piece.v[n][half][0] = load_stream(rows[n][half] + k);
      piece.v[n][half][1] = load_stream(rows[n][half] + k + 32);
    }
  }
  return piece;
}

template <class T, int NT, int MT, int DEPTH>
__global__ void __launch_bounds__(kWarps * 32) skinny_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];  // [kWarps][16 * NT][8 * MT + 1]
  constexpr int kStride = 8 * MT + 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * 16 * NT;
  const T* w = static_cast<const T*>(args.w);
  const T* rows[NT][2];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + n * 16 + half * 8 + g, args.n - 1);
      rows[n][half] = w + static_cast<int64_t>(row) * args.k + t * 8;
    }
  }
  Piece<NT> pieces[DEPTH];
  const int step = kWarps * kPiece;
  int ahead = warp * kPiece;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i, ahead += step) {
    if (ahead < args.k) pieces[i] = load_piece<T, NT>(rows, ahead);
  }
  let_next_start();
  wait_for_inputs();
  const T* columns[MT];
  bool is_column[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    is_column[m] = m * 8 + g < args.m;
    columns[m] = static_cast<const T*>(args.x) + (is_column[m] ? m * 8 + g : 0) * args.x_stride + t * 8;
  }
  float acc[NT][MT][4] = {};
  for (int k = warp * kPiece; k < args.k;) {
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (k < args.k) {
        uint4 x[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          x[m][0] = *reinterpret_cast<const uint4*>(columns[m] + k);
          x[m][1] = *reinterpret_cast<const uint4*>(columns[m] + k + 32);
        }
        const Piece<NT> now = pieces[i];
        if (ahead < args.k) pieces[i] = load_piece<T, NT>(rows, ahead);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
          for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const uint4 a = now.v[n][0][half], b = now.v[n][1][half];
              multiply<T>(acc[n][m], a.x, b.x, a.y, b.y, x[m][half].x, x[m][half].y);
              multiply<T>(acc[n][m], a.z, b.z, a.w, b.w, x[m][half].z, x[m][half].w);
            }
          }
        }
      }
      k += step;
      ahead += step;
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[(warp * 16 * NT + n * 16 + g + i / 2 * 8) * kStride + m * 8 + t * 2 + i % 2] = acc[n][m][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * NT * args.m; i += kWarps * 32) {
    const int row = i % (16 * NT), column = i / (16 * NT);
    if (first + row >= args.n) continue;
    float total = args.bias == nullptr ? 0.0f : to_float(static_cast<const T*>(args.bias)[first + row]);
#pragma unroll
    for (int other = 0; other < kWarps; ++other) total += sums[(other * 16 * NT + row) * kStride + column];
    static_cast<T*>(args.out)[column * args.out_stride + first + row] = from_float<T>(total);
  }
}

template <class T, int NT, int MT, int DEPTH>
void run(const SkinnyArgs& args, Stream stream) {
  constexpr size_t shared = sizeof(float) * kWarps * 16 * NT * (8 * MT + 1);
  static const cudaError_t allowed =
      cudaFuncSetAttribute(skinny_kernel<T, NT, MT, DEPTH>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  check(allowed, "shared memory of skinny_linear");
  launch(skinny_kernel<T, NT, MT, DEPTH>, dim3((args.n + 16 * NT - 1) / (16 * NT)), dim3(kWarps * 32), shared, stream, args);
}

}  // namespace

int skinny_max_rows() { return 32; }

void skinny_linear(const SkinnyArgs& args, Stream stream) {
  if (args.m < 1 || args.n < 1) return;
  if (args.m > skinny_max_rows() || args.k % kPiece != 0) {
    throw std::invalid_argument("skinny_linear takes up to " + std::to_string(skinny_max_rows()) + " rows and a K that 64 divides; got " +
                                std::to_string(args.m) + " rows, K " + std::to_string(args.k));
  }
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return run<T, 1, 1, 4>(args, stream);
    if (args.m <= 16) return run<T, 2, 2, 2>(args, stream);
    run<T, 2, 4, 2>(args, stream);
  });
}

}  // namespace trireme::cuda
