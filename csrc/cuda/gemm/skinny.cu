// GEMMs of small M with a large weight, bound by reading the weight once, on tensor cores.
//
// A CTA owns 16 * NT outputs; its warps alternate over K in pieces of 64 and are reduced at the end, always in the same order.
// Weights are loaded from memory directly into the A fragments of mma.m16n8k16: a dot product may take its k's in any order as long
// as both operands agree, so a thread feeds its 16 bytes (8 adjacent k's of one output) to two mma steps unpermuted, and x (the B
// fragments, 8 tokens to a tile) is read with the same assignment.
#include "cuda/gemm/gemm_tiles.cuh"

namespace trireme::cuda {
namespace {

constexpr int kPiece = 64;  // k's of one k-step
constexpr int kAhead = 1024;  // k's of an output that are prefetched into L2 beyond those being loaded

// One piece of a warp's weights: per 16 outputs, outputs g and g + 8, two times 16 bytes.
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
__global__ void __launch_bounds__(kProductWarps * 32) skinny_kernel(SkinnyArgs args) {
  extern __shared__ float sums[];
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
  const int step = kProductWarps * kPiece;
  int ahead = warp * kPiece;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i, ahead += step) {
    if (ahead < args.k) pieces[i] = load_piece<T, NT>(rows, ahead);
  }
  const int stop = min(args.k, DEPTH * step + kAhead);
  for (int i = threadIdx.x, at; (at = DEPTH * step + i / (16 * NT) * kPiece) < stop; i += blockDim.x) {
    prefetch_l2(w + static_cast<int64_t>(min(first + i % (16 * NT), args.n - 1)) * args.k + at);
  }
  pdl_launch_dependents();
  pdl_wait();
  const T* columns[MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    columns[m] = static_cast<const T*>(args.x) + (m * 8 + g < args.m ? m * 8 + g : 0) * args.x_stride + t * 8;
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
  store_products<T, NT, MT>(args, acc, sums, first);
}

}  // namespace

void skinny_dense(const SkinnyArgs& args, Stream stream) {
  with_half_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.m <= 8) return launch_products<1, 1>(skinny_kernel<T, 1, 1, 4>, args, stream);
    if (args.m <= 16) return launch_products<2, 2>(skinny_kernel<T, 2, 2, 2>, args, stream);
    launch_products<2, 4>(skinny_kernel<T, 2, 4, 2>, args, stream);
  });
}

int skinny_max_rows() { return 32; }

void skinny_linear(const SkinnyArgs& args, Stream stream) {
  if (args.m < 1 || args.n < 1) return;
  const int unit = args.weight == Weight::q4_k ? 256 : kPiece;
  if (args.m > skinny_max_rows() || args.k % unit != 0) {
    throw std::invalid_argument("skinny_linear takes up to " + std::to_string(skinny_max_rows()) + " rows and a K that " + std::to_string(unit) +
                                " divides; got " + std::to_string(args.m) + " rows, K " + std::to_string(args.k));
  }
  switch (args.weight) {
    case Weight::dense: return skinny_dense(args, stream);
    case Weight::fp8: return skinny_fp8(args, stream);
    case Weight::q4_k: return skinny_q4_k(args, stream);
  }
}

}  // namespace trireme::cuda
