// What the sanitizers need not tell. Their libraries look for these names.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FOR_THE_SANITIZER extern "C" __attribute__((visibility("default")))
#endif

// A connection that libfabric is just accepting when its endpoint is closed leaks the description
// of it, now and then.
#ifdef __SANITIZE_ADDRESS__
FOR_THE_SANITIZER const char* __lsan_default_suppressions();
FOR_THE_SANITIZER const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }
#endif

// libfabric is not instrumented, and uses memory of mutexes again. Two tests look at memory while
// it is written, to see that a receiver has begun.
#ifdef __SANITIZE_THREAD__
FOR_THE_SANITIZER const char* __tsan_default_suppressions();
FOR_THE_SANITIZER const char* __tsan_default_suppressions() {
  return "mutex:libfabric.so\nrace:StreamTest_ALargePutEndsHoweverItsBytesCome_Test\n"
         "race:CloseWhileAPeerWritesHere\n";
}
#endif
