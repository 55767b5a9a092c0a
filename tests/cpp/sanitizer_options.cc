// Reports that the sanitizers suppress. Their libraries look for these names.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FOR_THE_SANITIZER extern "C" __attribute__((visibility("default")))
#endif

// If libfabric is accepting a connection when its endpoint is closed, it sometimes leaks the
// connection's description.
#ifdef __SANITIZE_ADDRESS__
FOR_THE_SANITIZER const char* __lsan_default_suppressions();
FOR_THE_SANITIZER const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }
#endif

// libfabric is not instrumented, and reuses memory of mutexes. Two tests read memory while it is
// written, to see that a receiver has begun.
#ifdef __SANITIZE_THREAD__
FOR_THE_SANITIZER const char* __tsan_default_suppressions();
FOR_THE_SANITIZER const char* __tsan_default_suppressions() {
  return "mutex:libfabric.so\nrace:StreamTest_ALargePutEndsHoweverItsBytesCome_Test\n"
         "race:CloseWhileAPeerWritesHere\n";
}
#endif
