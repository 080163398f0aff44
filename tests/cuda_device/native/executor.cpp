// Stacks, the switch between them, and faults of a kernel's threads.
#include "executor.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <mutex>
#include <new>

namespace simt {

thread_local Executor* running = nullptr;

// Ends in an indirect jump, not in ret: the return address is never where the processor predicts it.
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
.globl simt_resume
.hidden simt_resume
simt_resume:
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
.size simt_switch, .-simt_switch
)");

static u8* map(u64 bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return (u8*)memory;
}

constexpr u64 kSignalStackBytes = 64 * 1024;

void Executor::prepare(u32 threads) {
  if (!stacks) {
    // The fibers find themselves by their stacks' alignment.
    u64 bytes = kMaxThreads * kStackBytes;
    u8* area = map(bytes + kStackBytes, PROT_NONE);
    u8* aligned = (u8*)(((u64)area + kStackBytes - 1) & ~(kStackBytes - 1));
    if (aligned > area) munmap(area, aligned - area);
    munmap(aligned + bytes, area + kStackBytes - aligned);
    stacks = aligned;
    shared = map(kSharedBytes + 2 * kPage, PROT_NONE) + kPage;
    mprotect(shared, kSharedBytes, PROT_READ | PROT_WRITE);
    signal_stack = map(kSignalStackBytes, PROT_READ | PROT_WRITE);
  }
  for (; prepared < threads; prepared++)
    if (mprotect(stacks + prepared * kStackBytes + kPage, kStackBytes - kPage, PROT_READ | PROT_WRITE))
      throw std::bad_alloc();
}

Executor::~Executor() {
  if (!stacks) return;
  munmap(stacks, kMaxThreads * kStackBytes);
  munmap(shared - kPage, kSharedBytes + 2 * kPage);
  munmap(signal_stack, kSignalStackBytes);
}

static void describe_failure(Executor& executor, int code, const Fiber* fiber, const char* what) {
  char text[512];
  const Dim3& block = executor.block.index;
  snprintf(text, sizeof text, "%s: block (%u, %u, %u), thread (%u, %u, %u): %s", executor.block.kernel->name, block.x,
           block.y, block.z, fiber->thread.x, fiber->thread.y, fiber->thread.z, what);
  executor.outcome.code = code;
  executor.outcome.message = text;
}

void fail(int code, const char* format, ...) {
  char what[384];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  Fiber* fiber = self();
  describe_failure(*running, code, fiber, what);
  simt_switch(&fiber->stack_pointer, running->outside);
  __builtin_unreachable();
}

static struct sigaction previous[NSIG];

// Nothing here is safe in a signal handler in general. It is here, because the signal is synchronous and comes from a
// kernel's code, which holds no lock and is not in the middle of an allocation.
static void on_fault(int signal, siginfo_t* info, void* context) {
  auto* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  Executor* executor = running;
  u64 stack = (u64)registers[REG_RSP];
  u64 first = executor ? (u64)executor->stacks : 0;
  if (!executor || stack < first || stack >= first + kMaxThreads * kStackBytes) {
    // Not of a kernel: whoever was responsible before is.
    if (signal == SIGSEGV && info->si_code == SEGV_PKUERR) {
      const char text[] = "software CUDA device: host code follows an address of the device\n";
      if (write(2, text, sizeof text - 1) < 0) {}
    }
    const struct sigaction& old = previous[signal];
    if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(signal, info, context);
    if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(signal);
    sigaction(signal, &old, nullptr);
    return;  // the instruction faults again, now with the default action
  }
  Fiber* fiber = (Fiber*)((stack & ~(kStackBytes - 1)) + kStackBytes - sizeof(Fiber));
  u64 address = (u64)info->si_addr;
  char what[160];
  int code = 700;
  if (signal == SIGILL) {
    code = 719;
    snprintf(what, sizeof what, "code that cannot be reached, or __builtin_trap");
  } else if (signal == SIGFPE) {
    code = 719;
    snprintf(what, sizeof what, "integer division by zero, whose result is undefined on the card");
  } else if (address >= first && address < first + kMaxThreads * kStackBytes) {
    code = 719;
    snprintf(what, sizeof what, "stack overflow");
  } else if (signal == SIGSEGV && info->si_code == SI_KERNEL) {
    snprintf(what, sizeof what, "access to an address that cannot be one");
  } else {
    snprintf(what, sizeof what, "illegal access at address 0x%llx", address);
  }
  describe_failure(*executor, code, fiber, what);
  registers[REG_RSP] = (greg_t)executor->outside;
  registers[REG_RIP] = (greg_t)simt_resume;
}

void install_fault_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(signal, &action, &previous[signal]);
  });
}

}  // namespace simt

// What the compiler calls where its checks (-fsanitize=alignment,bounds) fail, with the layout of its own tables.
struct SourceLocation {
  const char* file;
  u32 line, column;
};
static const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const SourceLocation* where, u64 address) {
  simt::fail(716, "misaligned access at address 0x%llx (%s:%u)", address, base_name(where->file), where->line);
}
extern "C" void __ubsan_handle_out_of_bounds_abort(const SourceLocation* where, u64 index) {
  simt::fail(700, "index %lld beyond the end of an array (%s:%u)", (long long)index, base_name(where->file), where->line);
}
