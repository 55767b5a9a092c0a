#include "tests/simt/sanitizers.h"

extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_set_fiber_name(void* fiber, const char* name);
__attribute__((weak)) void __tsan_ignore_thread_begin();
__attribute__((weak)) void __tsan_ignore_thread_end();
__attribute__((weak)) void __tsan_acquire(void* word);
__attribute__((weak)) void __tsan_release(void* word);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* memory, size_t bytes);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** kept, const void* bottom,
                                                          size_t bytes);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* kept, const void** bottom,
                                                           size_t* bytes);
}

namespace mooncake::simt::sanitizers {

thread_local bool Ignored::isActive_ = false;

Ignored::Ignored() {
  isActive_ = true;
  if (__tsan_ignore_thread_begin) __tsan_ignore_thread_begin();
}
Ignored::~Ignored() {
  isActive_ = wasActive_;
  if (__tsan_ignore_thread_end) __tsan_ignore_thread_end();
}

bool findsRaces() { return __tsan_create_fiber != nullptr; }

void* currentThread() { return __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr; }
void* makeThread(const char* name) {
  if (!__tsan_create_fiber) return nullptr;
  void* const fiber = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fiber, name);
  return fiber;
}
void dropThread(void* thread) {
  if (__tsan_destroy_fiber) __tsan_destroy_fiber(thread);
}
void switchThread(void* thread) {
  constexpr unsigned kNoOrder = 1;
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(thread, kNoOrder);
}

void release(const void* word) {
  if (__tsan_release) __tsan_release(const_cast<void*>(word));
}
void acquire(const void* word) {
  if (__tsan_acquire) __tsan_acquire(const_cast<void*>(word));
}

void clean(void* memory, size_t bytes) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(memory, bytes);
}

void beforeSwitch(void** kept, const void* bottom, size_t bytes) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(kept, bottom, bytes);
}
void afterSwitch(void* kept, const void** bottomBefore, size_t* bytesBefore) {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(kept, bottomBefore, bytesBefore);
}

}  // namespace mooncake::simt::sanitizers
