// The only pool of native threads of this process. Kernels call parallel(); nothing else in csrc creates threads.
// A call made inside a task, or while another caller uses the pool, runs serially on its own thread: results must
// therefore never depend on the thread number, and scratch indexed by it must belong to the call, not to the process.
// Tasks must not throw. Not usable in a child made by fork() without exec.
#pragma once

#include <type_traits>
#include <vector>

namespace trireme {

using TaskFn = void (*)(void* context, int task, int thread);

// Threads that take part in a parallel call, including the caller. Initially the number of CPUs in the affinity mask.
int num_threads();

// At least 1. Threads start at the next parallel call. Must not be called from inside a task.
void set_num_threads(int count);

// Pins thread i of the pool to cores[i % size]: the calling thread (thread 0) at once, the others when they restart. Empty: all
// may run on every core that the process had at its first call. Throws std::system_error for a core outside the affinity mask.
void set_cores(const std::vector<int>& cores);

// How long an idle thread spins for work before it sleeps, in microseconds (default 60).
void set_spin_us(int spin_us);

// Runs fn(context, task, thread) for every task in [0, num_tasks), 0 <= thread < num_threads(); returns when all are done.
void run_parallel(int num_tasks, TaskFn fn, void* context);

// f(int task, int thread), tasks are claimed one by one in ascending order.
template <class F>
void parallel(int num_tasks, F&& f) {
  using Body = std::remove_reference_t<F>;
  run_parallel(
      num_tasks, [](void* context, int task, int thread) { (*static_cast<Body*>(context))(task, thread); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace trireme
