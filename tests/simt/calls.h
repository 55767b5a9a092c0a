#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/simt/where.h"

// What kernels call on the CPU, by way of kernels/device.h and builtins.h. Each call belongs to the
// CUDA thread that runs at the moment. None creates an order between CUDA threads which CUDA itself
// would not create: the thread sanitizer sees the kernels' own order only.
namespace mooncake::simt {

enum class Scope : uint8_t { kBlock, kDevice, kSystem };
enum class Access : uint8_t { kLoad, kStore, kUpdate };

// Before an atomic access: checks state space and scope, and lets other threads run.
void beforeAtomic(const void* address, size_t bytes, Access access, Scope scope, Where where);
// After an atomic store or update: threads that spin look again.
void afterChange();
// Orders memory for other processes. Within a World, threads see each other's accesses in their order.
void fence();
// Before a plain access of a unit of up to 16 bytes. Compilers may report none of these.
void beforeUnit(const void* address, size_t bytes, Access access);
// Before any plain access, in builds whose compiler reports these.
void beforePlain(const void* address, size_t bytes, Access access);

// A spin has found nothing: the thread runs again once a word has changed, or time has passed.
void relax(Where where);
uint64_t now();  // nanoseconds

unsigned lane();
bool syncThreads(Where where, bool vote = true);  // whether all threads have voted so
void syncWarp(unsigned mask, Where where);

// The lanes of `mask` exchange 64 bits each. As in CUDA, this orders no memory. Lanes outside the
// mask have undefined values.
enum class WarpCall : uint8_t { kSync, kShuffle, kBallot, kMatch, kReduce };
struct LaneValues {
  uint64_t of[32];
};
LaneValues exchange(WarpCall call, unsigned mask, uint64_t value, Where where);

// Memory of the thread's block, filled with 0xa5 at first. `key` stands for the declaration.
void* staticShared(const void* key, size_t bytes, size_t alignment);
void* dynamicShared();

// The kernel has done what would be undefined on a GPU. The run ends with this text.
[[noreturn]] void fail(const char* text, Where where);

}  // namespace mooncake::simt
