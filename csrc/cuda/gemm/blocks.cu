// Dispatch of GEMMs and dequantization by quant block type.
#include "cuda/gemm/block_dots.cuh"

namespace trireme::cuda {
namespace {

template <class Block>
struct Of {
  using type = Block;
};

// Calls f with Of<the type named by `blocks`>.
template <class F>
auto with_blocks(Blocks blocks, F&& f) {
  switch (blocks) {
    case Blocks::q4_k: return f(Of<Q4K>{});
    case Blocks::q5_k: return f(Of<Q5K>{});
    case Blocks::q6_k: return f(Of<Q6K>{});
    case Blocks::q8_0: return f(Of<Q8_0>{});
    case Blocks::q4_0: return f(Of<Q4_0>{});
    case Blocks::q4_1: return f(Of<Q4_1>{});
    case Blocks::q5_0: return f(Of<Q5_0>{});
    case Blocks::q5_1: return f(Of<Q5_1>{});
    case Blocks::iq4_nl: return f(Of<IQ4NL>{});
  }
  throw std::invalid_argument("unknown type of blocks " + std::to_string(static_cast<int>(blocks)));
}

}  // namespace

int block_linear_rows(Blocks blocks, int n, int k) {
  return with_blocks(blocks, [&](auto of) { return rows_of_dots<typename decltype(of)::type>(n, k); });
}

void block_linear(const SkinnyArgs& args, Blocks blocks, Stream stream) {
  if (args.m < 1 || args.n < 1) return;
  const int most = args.k % kSuperValues == 0 ? block_linear_rows(blocks, args.n, args.k) : 0;
  if (args.m > most) {
    throw std::invalid_argument("block_linear takes a K that 256 divides and here up to " + std::to_string(most) + " rows; got K " +
                                std::to_string(args.k) + ", " + std::to_string(args.m) + " rows");
  }
  with_blocks(blocks, [&](auto of) { run_dots<typename decltype(of)::type>(args, stream); });
}

void expand_blocks(const void* blocks, void* out, int64_t count, Blocks kind, Type type, Stream stream) {
  with_blocks(kind, [&](auto of) { run_expansion<typename decltype(of)::type>(blocks, out, count, type, stream); });
}

int block_bytes(Blocks blocks) {
  return with_blocks(blocks, [](auto of) { return decltype(of)::type::kBytes; });
}

}  // namespace trireme::cuda
