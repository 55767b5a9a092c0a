#pragma once

#include <cstddef>
#include <cstdint>

// All that kernels may use beside C++: one source, which nvcc compiles for GPUs and a C++ compiler
// for the CPU, where each CUDA thread is a fiber (tests/simt). Kernel files include only this and
// kernels/common. Acquire and release belong to an access: the thread sanitizer knows no fences.
//
// Names end with the scope: Block, Device (the threads of one GPU) or System (all GPUs, and the
// host). A word that ranks share needs System.

#ifdef __CUDACC__

#define MC_DEVICE __device__ __forceinline__
// One object of the block. `MC_DYNAMIC_SHARED` is the memory that the launch asks for.
#define MC_SHARED(type, name) __shared__ type name
#define MC_DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(16) unsigned char mooncakeShared[]; \
  type* const name = reinterpret_cast<type*>(mooncakeShared)
// The last parameter of a function that waits, and its argument: a report of the CPU names the
// caller's line.
#define MC_WHERE
#define MC_HERE

namespace mooncake::kernels {

#define MC_LOAD(name, order)                                                                \
  MC_DEVICE uint32_t name(const uint32_t* word) {                                           \
    uint32_t value;                                                                         \
    asm volatile("ld." order ".global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory"); \
    return value;                                                                           \
  }                                                                                         \
  MC_DEVICE uint64_t name(const uint64_t* word) {                                           \
    uint64_t value;                                                                         \
    asm volatile("ld." order ".global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory"); \
    return value;                                                                           \
  }
#define MC_STORE(name, order)                                                             \
  MC_DEVICE void name(uint32_t* word, uint32_t value) {                                   \
    asm volatile("st." order ".global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory"); \
  }                                                                                       \
  MC_DEVICE void name(uint64_t* word, uint64_t value) {                                   \
    asm volatile("st." order ".global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory"); \
  }
#define MC_ADD(name, order)                                    \
  MC_DEVICE uint32_t name(uint32_t* word, uint32_t value) {    \
    uint32_t old;                                              \
    asm volatile("atom." order ".global.add.u32 %0, [%1], %2;" \
                 : "=r"(old)                                   \
                 : "l"(word), "r"(value)                       \
                 : "memory");                                  \
    return old;                                                \
  }
// Stores `value` if the word is `expected`. Returns the word's old value.
#define MC_SWAP(name, order)                                                   \
  MC_DEVICE uint32_t name(uint32_t* word, uint32_t expected, uint32_t value) { \
    uint32_t old;                                                              \
    asm volatile("atom." order ".global.cas.b32 %0, [%1], %2, %3;"             \
                 : "=r"(old)                                                   \
                 : "l"(word), "r"(expected), "r"(value)                        \
                 : "memory");                                                  \
    return old;                                                                \
  }

// Nanoseconds. All GPUs of a host may differ: compare moments of one GPU only.
MC_DEVICE uint64_t now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
// In each turn of a loop that waits.
MC_DEVICE void relax() { __nanosleep(20); }
// A fence between two accesses of a thread, for all GPUs and the host. If a thread writes A and then
// B, and another one reads B and then A, both with this call between, the second one does not see the
// new B and the old A. Also holds for accesses that barriers, acquires of any scope or ends of kernels
// order before or after the call.
MC_DEVICE void fenceSystem() { asm volatile("fence.sc.sys;" ::: "memory"); }
MC_DEVICE unsigned lane() {
  unsigned number;
  asm("mov.u32 %0, %%laneid;" : "=r"(number));
  return number;
}
// Up to 16 bytes at once, at an address that is a multiple of their size.
template <typename Unit>
MC_DEVICE Unit loadUnit(const Unit* from) {
  return *from;
}
template <typename Unit>
MC_DEVICE void storeUnit(Unit* to, const Unit& unit) {
  *to = unit;
}

#else

#include <type_traits>

#include "tests/simt/builtins.h"

#define MC_DEVICE inline
#define MC_SHARED(type, name) \
  static char name##Key;      \
  type& name =                \
      *static_cast<type*>(mooncake::simt::staticShared(&name##Key, sizeof(type), alignof(type)))
#define MC_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(mooncake::simt::dynamicShared())
#define MC_WHERE , mooncake::simt::Where where = mooncake::simt::Where::current()
#define MC_HERE , where

namespace mooncake::kernels {

namespace host {
using simt::Access;
using simt::Scope;
constexpr Scope scopeOf(const char* order) {
  for (; *order; ++order) {
    if (order[0] == '.') return order[1] == 's' ? Scope::kSystem : Scope::kDevice;
  }
  return Scope::kDevice;
}
constexpr int orderOf(const char* order) {
  if (order[0] == 'r' && order[2] == 'l') {
    return order[3] == 'a' ? __ATOMIC_RELAXED : __ATOMIC_RELEASE;
  }
  return order[3] == '_' ? __ATOMIC_ACQ_REL : __ATOMIC_ACQUIRE;
}
}  // namespace host

#define MC_LOAD(name, order)                                                                  \
  template <typename Word>                                                                    \
  inline Word name(const Word* word MC_WHERE) {                                               \
    simt::beforeAtomic(word, sizeof(Word), host::Access::kLoad, host::scopeOf(order), where); \
    constexpr int kOrder = host::orderOf(order);                                              \
    return __atomic_load_n(word, kOrder);                                                     \
  }
#define MC_STORE(name, order)                                                                  \
  template <typename Word>                                                                     \
  inline void name(Word* word, std::type_identity_t<Word> value MC_WHERE) {                    \
    simt::beforeAtomic(word, sizeof(Word), host::Access::kStore, host::scopeOf(order), where); \
    constexpr int kOrder = host::orderOf(order);                                               \
    __atomic_store_n(word, value, kOrder);                                                     \
    simt::afterChange();                                                                       \
  }
#define MC_ADD(name, order)                                                                      \
  inline uint32_t name(uint32_t* word, uint32_t value MC_WHERE) {                                \
    simt::beforeAtomic(word, sizeof(*word), host::Access::kUpdate, host::scopeOf(order), where); \
    constexpr int kOrder = host::orderOf(order);                                                 \
    const uint32_t old = __atomic_fetch_add(word, value, kOrder);                                \
    simt::afterChange();                                                                         \
    return old;                                                                                  \
  }
#define MC_SWAP(name, order)                                                                     \
  inline uint32_t name(uint32_t* word, uint32_t expected, uint32_t value MC_WHERE) {             \
    simt::beforeAtomic(word, sizeof(*word), host::Access::kUpdate, host::scopeOf(order), where); \
    constexpr int kOrder = host::orderOf(order);                                                 \
    __atomic_compare_exchange_n(word, &expected, value, false, kOrder, __ATOMIC_RELAXED);        \
    simt::afterChange();                                                                         \
    return expected;                                                                             \
  }

inline uint64_t now() { return simt::now(); }
inline void relax(simt::Where where = simt::Where::current()) { simt::relax(where); }
inline void fenceSystem() { simt::fence(); }
inline unsigned lane() { return simt::lane(); }
template <typename Unit>
inline Unit loadUnit(const Unit* from) {
  simt::beforeUnit(from, sizeof(Unit), host::Access::kLoad);
  return *from;
}
template <typename Unit>
inline void storeUnit(Unit* to, const Unit& unit) {
  simt::beforeUnit(to, sizeof(Unit), host::Access::kStore);
  *to = unit;
}

#endif

MC_LOAD(loadRelaxedSystem, "relaxed.sys")
MC_LOAD(loadAcquireSystem, "acquire.sys")
MC_LOAD(loadRelaxedDevice, "relaxed.gpu")
MC_LOAD(loadAcquireDevice, "acquire.gpu")
MC_STORE(storeRelaxedSystem, "relaxed.sys")
MC_STORE(storeReleaseSystem, "release.sys")
MC_STORE(storeRelaxedDevice, "relaxed.gpu")
MC_STORE(storeReleaseDevice, "release.gpu")
MC_ADD(addRelaxedDevice, "relaxed.gpu")
MC_ADD(addAcqRelDevice, "acq_rel.gpu")
MC_SWAP(swapRelaxedDevice, "relaxed.gpu")

#undef MC_LOAD
#undef MC_STORE
#undef MC_ADD
#undef MC_SWAP

}  // namespace mooncake::kernels
