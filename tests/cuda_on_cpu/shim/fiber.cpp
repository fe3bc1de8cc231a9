// Switching stacks, and telling AddressSanitizer of it. This file is not instrumented itself.
#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define __sanitizer_start_switch_fiber(save, bottom, size)
#define __sanitizer_finish_switch_fiber(saved, bottom, size)
#define ASAN_UNPOISON_MEMORY_REGION(begin, size)
#endif

namespace cuda_on_cpu {
namespace {

// A kernel's arguments are copied to it: up to 32 KiB. ASan's frames are large as well.
constexpr size_t kStack = 256 * 1024;
const size_t kPage = sysconf(_SC_PAGESIZE);

// One scheduler: blocks run one after another.
Context scheduler;
[[maybe_unused]] const void* scheduler_bottom;
[[maybe_unused]] size_t scheduler_size;
Fiber* entered;

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

// Keeps what a callee must keep on the stack, and the stack pointer in *from; goes on at `to`.
// ucontext does the same with a system call each time: five times slower.
extern "C" void cuda_on_cpu_switch(Context* from, Context to);
asm(R"(
.text
.hidden cuda_on_cpu_switch
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");

void switch_context(Context& from, Context& to) { cuda_on_cpu_switch(&from, to); }

void make_context(Context& context, char* stack, void (*begin)()) {
  void** top = reinterpret_cast<void**>(stack + kStack);
  *--top = nullptr;  // where begin() would return to; the stack is aligned as after a call
  *--top = reinterpret_cast<void*>(begin);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}

#else

void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

void make_context(Context& context, char* stack, void (*begin)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
}

#endif

}  // namespace

Fiber::Fiber() {
  void* memory = mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  stack_ = memory_ + kPage;
  mprotect(memory_, kPage, PROT_NONE);
}

Fiber::~Fiber() { munmap(memory_, kPage + kStack); }

void Fiber::start(void (*body)()) {
  if (!ended_) ASAN_UNPOISON_MEMORY_REGION(stack_, kStack);
  ended_ = false;
  body_ = body;
  fake_stack_ = nullptr;
  make_context(context_, stack_, [] { entered->run_body(); });
}

void Fiber::run_body() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
  body_();
  std::abort();  // It left for good.
}

void Fiber::enter() {
  entered = this;
  [[maybe_unused]] void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack_, kStack);
  switch_context(scheduler, context_);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void Fiber::leave() {
  __sanitizer_start_switch_fiber(&fake_stack_, scheduler_bottom, scheduler_size);
  switch_context(context_, scheduler);
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
}

void Fiber::leave_for_good() {
  ended_ = true;
  __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
  switch_context(context_, scheduler);
  std::abort();  // Nobody enters a fiber that has ended.
}

}  // namespace cuda_on_cpu
