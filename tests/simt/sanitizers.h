#pragma once

#include <cstddef>

// The sanitizers' functions for programs that switch stacks. Each does nothing in a program without
// that sanitizer. The emulator itself is compiled without sanitizers: they see kernels and tests
// only, and the order that these calls tell them.
namespace mooncake::simt::sanitizers {

// While one lives, accesses of the running CUDA thread are the emulator's own. The thread sanitizer
// must ignore them: malloc and memcpy report theirs, whatever calls them. And templates of the
// standard library may be a kernel's instance, which reports its plain accesses.
class Ignored {
 public:
  Ignored();
  ~Ignored();
  Ignored(const Ignored&) = delete;
  Ignored& operator=(const Ignored&) = delete;

  static bool isActive() { return isActive_; }
  // A fiber runs for the first time: the switch to it was the emulator's, it itself is not.
  static void reset() { isActive_ = false; }

 private:
  static thread_local bool isActive_;

  const bool wasActive_ = isActive_;
};

bool findsRaces();
void* currentThread();
void* makeThread(const char* name);  // ordered after the caller's work so far
void dropThread(void* thread);
// The running thread will be `thread`. This orders nothing.
void switchThread(void* thread);

// All work before release(word) comes before the work after a later acquire(word).
void release(const void* word);
void acquire(const void* word);

// Forgets all about memory that has been another stack.
void clean(void* memory, size_t bytes);

// Around a switch of stacks. `kept` belongs to the stack that is left, null if it is never
// entered again.
void beforeSwitch(void** kept, const void* bottom, size_t bytes);
void afterSwitch(void* kept, const void** bottomBefore, size_t* bytesBefore);

}  // namespace mooncake::simt::sanitizers
