// What the address sanitizer need not tell. A connection that libfabric is just accepting when its
// endpoint is closed leaks the description of it, now and then.
#ifdef __SANITIZE_ADDRESS__
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }
#endif
