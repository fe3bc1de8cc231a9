// One thread of a block: a stack of its own that the scheduler enters and that leaves by itself.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) || defined(CUDA_ON_CPU_UCONTEXT)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
using Context = void*;  // the stack pointer; what else is to be kept lies on the stack
#else
using Context = ucontext_t;
#endif

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next enter() begin with body(), which must end with leave_for_good(). What ran on
  // this stack before is forgotten, finished or not.
  void start(void (*body)());

  // Called by the scheduler: runs the fiber until it leaves.
  void enter();

  // Called on the fiber: goes back to the scheduler.
  void leave();
  [[noreturn]] void leave_for_good();

 private:
  void run_body();

  char* memory_;  // a page that nobody may touch, then the stack
  char* stack_;
  void (*body_)() = nullptr;
  Context context_;
  bool ended_ = true;
  void* fake_stack_ = nullptr;
};

}  // namespace cuda_on_cpu
