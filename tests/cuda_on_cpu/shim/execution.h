// Runs a kernel's grid on the host: blocks one after another, the threads of a block as fibers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>

#include "streams.h"

namespace cuda_on_cpu {

struct Index {
  unsigned int x, y, z;
};
extern Index threadIdx, blockIdx, blockDim, gridDim;

enum class Order : int { kForward, kBackward, kShuffled };

// What a test may choose; on_cuda_kernels.py sets it.
struct Settings {
  Order order = Order::kForward;  // of the blocks of a grid, and of the threads of a block
  int64_t blocks_at_ends = 0;     // not 0: only so many blocks at each end of a grid are run
  bool numbers_on_host = false;   // operators_on_cpu.cpp
};
extern Settings settings;

// Blocks of all grids that were run since a test chose, those that were left out too.
extern int64_t all_blocks;

// For __syncthreads: returns when all threads of the block that have not ended wait here.
void wait_at_barrier(std::source_location where);

// For __shfl_sync and its kind: returns when all lanes of the mask wait here, with the value of
// lane `source` in place of this lane's own.
constexpr size_t kLargestShuffled = 16;  // bytes
struct Shuffle {
  unsigned int mask;
  unsigned int source;
  void* value;
  size_t bytes;
  std::source_location where;
};
void shuffle(const Shuffle& mine);

struct Grid {
  int64_t blocks;
  int threads;         // of a block
  const void* kernel;  // whose name an error message is to say
};

// Calls thread(context) once for each thread of the grid. Throws std::runtime_error with one
// sentence if a thread does what CUDA forbids.
void run_grid(const Grid& grid, void (*thread)(const void*), const void* context);

// What builder.py writes in place of kernel<<<blocks, threads, shared_bytes,
// stream>>>(arguments...). The launch has its own copy of the arguments, and so has every thread:
// as on a device it may change them.
template <typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), unsigned int blocks, int threads, size_t, Stream stream,
           const Arguments&... arguments) {
  submit(stream, [=] {
    const auto thread = [&] { kernel(arguments...); };
    run_grid(
        {blocks, threads, reinterpret_cast<const void*>(kernel)},
        [](const void* context) { (*static_cast<decltype(&thread)>(context))(); }, &thread);
  });
}

}  // namespace cuda_on_cpu
