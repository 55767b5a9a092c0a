#include "tests/simt/fiber.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sys/mman.h>
#include <utility>
#include <vector>

#include "tests/simt/sanitizers.h"

#ifndef __x86_64__
#error "tests/simt switches stacks on x86-64 only"
#endif

// Saves the registers that a call preserves, and continues on another stack.
extern "C" void mooncakeSimtSwap(void** from, void* to);
asm(R"(
.text
.globl mooncakeSimtSwap
.type mooncakeSimtSwap,@function
mooncakeSimtSwap:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size mooncakeSimtSwap,.-mooncakeSimtSwap
)");

namespace mooncake::simt {
namespace {

constexpr size_t kGuard = 4096;

thread_local std::vector<std::unique_ptr<Stack>> freeStacks;
thread_local Fiber* leaving = nullptr;  // the fiber of the switch under way
thread_local Fiber* entering = nullptr;

std::unique_ptr<Stack> takeStack() {
  if (freeStacks.empty()) return std::make_unique<Stack>();
  std::unique_ptr<Stack> stack = std::move(freeStacks.back());
  freeStacks.pop_back();
  return stack;
}

// Fibers that end are not ordered before later ones. So the thread sanitizer would take a second
// use of a stack for a race.
void giveStack(std::unique_ptr<Stack> stack) {
  if (!sanitizers::findsRaces()) freeStacks.push_back(std::move(stack));
}

}  // namespace

Stack::Stack() {
  void* const memory = ::mmap(nullptr, kGuard + kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || ::mprotect(memory, kGuard, PROT_NONE) != 0) {
    std::perror("simt: a stack cannot be mapped (vm.max_map_count limits their number)");
    std::abort();
  }
  bottom_ = static_cast<std::byte*>(memory) + kGuard;
  sanitizers::clean(bottom_, kBytes);
}

Stack::~Stack() { ::munmap(bottom_ - kGuard, kGuard + kBytes); }

Fiber::Fiber() : body_(nullptr), thread_(sanitizers::currentThread()) {}

Fiber::Fiber(void (*body)(), const std::string& name)
    : stack_(takeStack()), body_(body), thread_(sanitizers::makeThread(name.c_str())) {
  void** top = reinterpret_cast<void**>(stack_->top() - 16);
  *--top = nullptr;  // enter() has no caller
  *--top = reinterpret_cast<void*>(&Fiber::enter);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  stackPointer_ = top;
}

Fiber::~Fiber() {
  if (!isOver_) return;  // a thread's own, or one that has stopped in the middle of a call
  sanitizers::dropThread(thread_);
  giveStack(std::move(stack_));
}

void Fiber::swap(Fiber& from, Fiber& to, bool isLast) {
  leaving = &from;
  from.isOver_ = isLast;
  entering = &to;
  sanitizers::beforeSwitch(isLast ? nullptr : &from.keptStack_,
                           to.stack_ ? to.stack_->bottom() : to.ownBottom_,
                           to.stack_ ? Stack::kBytes : to.ownBytes_);
  sanitizers::switchThread(to.thread_);
  mooncakeSimtSwap(&from.stackPointer_, to.stackPointer_);
  sanitizers::afterSwitch(from.keptStack_, nullptr, nullptr);
}

void Fiber::enter() {
  const void* bottom = nullptr;
  size_t bytes = 0;
  sanitizers::afterSwitch(nullptr, &bottom, &bytes);
  if (!leaving->stack_) {
    leaving->ownBottom_ = bottom;
    leaving->ownBytes_ = bytes;
  }
  sanitizers::Ignored::reset();
  entering->body_();
  std::abort();
}

}  // namespace mooncake::simt
