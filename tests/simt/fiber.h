#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace mooncake::simt {

// Memory for the stack of a fiber, above a page that must not be touched. Stacks are used again: a
// process may have 65,530 mappings, and each stack takes two.
class Stack {
 public:
  static constexpr size_t kBytes = 64 << 10;

  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  std::byte* bottom() const { return bottom_; }
  std::byte* top() const { return bottom_ + kBytes; }

 private:
  std::byte* bottom_;
};

// A flow of control with a stack of its own, or the one of the operating system's thread.
class Fiber {
 public:
  // The calling thread's own flow of control.
  Fiber();
  // `body` runs when the fiber is first switched to. It never returns: it switches away for good.
  Fiber(void (*body)(), const std::string& name);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Leaves `from`, which is the running one, for `to`. Returns when another switch comes back.
  // `isLast`: none will.
  static void swap(Fiber& from, Fiber& to, bool isLast);

 private:
  static void enter();

  std::unique_ptr<Stack> stack_;  // null: the thread's own
  void (*const body_)();
  void* stackPointer_ = nullptr;
  bool isOver_ = false;
  void* thread_;                     // the thread sanitizer's
  void* keptStack_ = nullptr;        // the address sanitizer's
  const void* ownBottom_ = nullptr;  // of a thread's own stack, once known
  size_t ownBytes_ = 0;
};

}  // namespace mooncake::simt
