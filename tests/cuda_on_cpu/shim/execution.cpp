// The scheduler: lets each thread of a block run until it waits, in the order that a test chose,
// then lets those go on that have what they wait for. Not instrumented itself.
#include "execution.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "report.h"

// Where the linker puts all __shared__ variables; nullptr if there are none.
extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));

namespace cuda_on_cpu {

Index threadIdx, blockIdx, blockDim, gridDim;
Settings settings;
int64_t all_blocks = 0;

namespace {

constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtShuffle, kEnded };

struct Thread {
  State state;
  std::source_location where;  // it waits
  Shuffle shuffle;
  std::unique_ptr<Fiber> fiber;  // from its first run on until it ends
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<Fiber>> free_fibers;  // Used again while it is hot in the cache.
  void (*body)(const void*);
  const void* context;
};
Block block;

Thread& current() { return block.threads[threadIdx.x]; }

void wait(State state, std::source_location where) {
  Thread& thread = current();
  thread.state = state;
  thread.where = where;
  thread.fiber->leave();
}

void run_thread() {
  block.body(block.context);
  current().state = State::kEnded;
  current().fiber->leave_for_good();
}

// Filled with NaN: what a block reads before it writes it, it does not know. A loop of its own,
// because the memset of AddressSanitizer would find the red zones between the variables.
void spoil_shared_memory() {
  for (volatile char* byte = __start_cuda_shared; byte < __stop_cuda_shared; ++byte) *byte = -1;
}

std::string waits(int thread) {
  const bool at_barrier = block.threads[thread].state == State::kAtBarrier;
  return "thread " + std::to_string(thread) + " waits at the " +
         (at_barrier ? "barrier" : "shuffle") + " of " + place(block.threads[thread].where);
}

bool same_place(int one, int other) {
  const std::source_location a = block.threads[one].where;
  const std::source_location b = block.threads[other].where;
  return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

// Lets the threads go on that have all come to one barrier. An early end is no divergence.
bool open_barrier() {
  int first = -1;
  for (int i = 0; i < static_cast<int>(block.threads.size()); ++i) {
    if (block.threads[i].state == State::kEnded) continue;
    if (block.threads[i].state != State::kAtBarrier) return false;
    if (first == -1) first = i;
    if (!same_place(first, i)) fail("divergence at a barrier: " + waits(first) + ", " + waits(i));
  }
  if (first == -1) return false;
  for (Thread& thread : block.threads) {
    if (thread.state == State::kAtBarrier) thread.state = State::kReady;
  }
  return true;
}

// Whether all lanes of the mask of `thread`, which waits at a shuffle, wait at that shuffle too.
bool lanes_are_there(int thread) {
  const Shuffle& shuffle = block.threads[thread].shuffle;
  const int warp = thread / kWarp * kWarp;
  if (!(shuffle.mask >> (thread - warp) & 1)) {
    fail(waits(thread) + ", whose mask does not name its own lane " +
         std::to_string(thread - warp));
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(shuffle.mask >> lane & 1)) continue;
    const int other = warp + lane;
    if (other >= static_cast<int>(block.threads.size()) ||
        block.threads[other].state == State::kEnded) {
      fail(waits(thread) + ", whose mask names lane " + std::to_string(lane) + ", which has ended");
    }
    if (block.threads[other].state != State::kAtShuffle) return false;
    if (block.threads[other].shuffle.mask != shuffle.mask || !same_place(thread, other)) {
      fail("divergence at a shuffle: " + waits(thread) + ", " + waits(other) +
           ", and one names the other");
    }
  }
  return true;
}

void exchange(int thread) {
  const int warp = thread / kWarp * kWarp;
  const Shuffle shuffle = block.threads[thread].shuffle;
  char values[kWarp * kLargestShuffled];
  std::memset(values, -1, sizeof(values));  // What a lane holds that is not named: NaN.
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(shuffle.mask >> lane & 1)) continue;
    std::memcpy(&values[lane * shuffle.bytes], block.threads[warp + lane].shuffle.value,
                shuffle.bytes);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(shuffle.mask >> lane & 1)) continue;
    Thread& other = block.threads[warp + lane];
    std::memcpy(other.shuffle.value, &values[other.shuffle.source % kWarp * shuffle.bytes],
                shuffle.bytes);
    other.state = State::kReady;
  }
}

bool finish_shuffles() {
  bool any = false;
  for (int i = 0; i < static_cast<int>(block.threads.size()); ++i) {
    if (block.threads[i].state != State::kAtShuffle || !lanes_are_there(i)) continue;
    exchange(i);
    any = true;
  }
  return any;
}

// Threads wait, and none of them will ever go on: some at the barrier, some at a shuffle.
[[noreturn]] void fail_for_deadlock() {
  int first = -1;
  for (int i = 0; i < static_cast<int>(block.threads.size()); ++i) {
    const State state = block.threads[i].state;
    if (state == State::kEnded) continue;
    if (first == -1) first = i;
    if (state != block.threads[first].state) fail("deadlock: " + waits(first) + ", " + waits(i));
  }
  fail("deadlock: " + waits(first));
}

void free_fiber_of(Thread& thread) {
  if (thread.fiber != nullptr) block.free_fibers.push_back(std::move(thread.fiber));
}

void run_until_it_waits(int thread) {
  std::unique_ptr<Fiber>& fiber = block.threads[thread].fiber;
  if (fiber == nullptr) {
    if (block.free_fibers.empty()) block.free_fibers.push_back(std::make_unique<Fiber>());
    fiber = std::move(block.free_fibers.back());
    block.free_fibers.pop_back();
    fiber->start(&run_thread);
  }
  threadIdx = {static_cast<unsigned int>(thread), 0, 0};
  fiber->enter();
  if (block.threads[thread].state == State::kEnded) free_fiber_of(block.threads[thread]);
}

void run_block(const std::vector<int>& order) {
  spoil_shared_memory();
  for (Thread& thread : block.threads) {
    free_fiber_of(thread);  // It has one if the last block failed.
    thread.state = State::kReady;
  }
  while (true) {
    for (const int thread : order) {
      if (block.threads[thread].state == State::kReady) run_until_it_waits(thread);
    }
    const auto ended = [](const Thread& thread) { return thread.state == State::kEnded; };
    if (std::all_of(block.threads.begin(), block.threads.end(), ended)) return;
    const bool shuffled = finish_shuffles();
    if (!open_barrier() && !shuffled) fail_for_deadlock();
  }
}

template <typename Integer>
std::vector<Integer> in_order(Integer count) {
  std::vector<Integer> order(count);
  std::iota(order.begin(), order.end(), Integer{0});
  std::mt19937 fixed_seed(7);
  if (settings.order == Order::kBackward) std::reverse(order.begin(), order.end());
  if (settings.order == Order::kShuffled) std::shuffle(order.begin(), order.end(), fixed_seed);
  return order;
}

bool is_left_out(int64_t index, int64_t blocks) {
  const int64_t ends = settings.blocks_at_ends;
  return ends != 0 && ends <= index && index < blocks - ends;
}

}  // namespace

void wait_at_barrier(std::source_location where) { wait(State::kAtBarrier, where); }

void shuffle(const Shuffle& mine) {
  current().shuffle = mine;
  wait(State::kAtShuffle, mine.where);
}

void run_grid(const Grid& grid, void (*thread)(const void*), const void* context) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const Reporting reporting(grid);
  all_blocks += grid.blocks;
  block.body = thread;
  block.context = context;
  block.threads.resize(grid.threads);
  gridDim = {static_cast<unsigned int>(grid.blocks), 1, 1};
  blockDim = {static_cast<unsigned int>(grid.threads), 1, 1};
  const std::vector<int> order = in_order(grid.threads);
  for (const int64_t index : in_order(grid.blocks)) {
    if (is_left_out(index, grid.blocks)) continue;
    blockIdx = {static_cast<unsigned int>(index), 0, 0};
    run_block(order);
  }
}

}  // namespace cuda_on_cpu

// For ctypes.
extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_choose(int order,
                                                                          int64_t blocks_at_ends,
                                                                          bool numbers_on_host) {
  cuda_on_cpu::settings = {static_cast<cuda_on_cpu::Order>(order), blocks_at_ends, numbers_on_host};
  cuda_on_cpu::all_blocks = 0;
}

extern "C" __attribute__((visibility("default"))) int64_t cuda_on_cpu_all_blocks() {
  return cuda_on_cpu::all_blocks;
}
