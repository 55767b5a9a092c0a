#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda.h>
#include <string>

// The first device of this process, its memory and its kernels. All functions end the process if
// the driver returns an error.
namespace probe {

// Initialises the driver and makes the device's primary context the thread's current one.
void openDevice();
CUcontext context();
// Makes the context of openDevice() current in another thread.
void useContext();
int attribute(CUdevice_attribute attribute);

// Reads the file of the kernels (kernels.cu). Returns false if it cannot be read.
bool readImage(const std::string& path);
const void* image();
// Returns a kernel. It is on the device already, so that its first launch loads nothing.
CUfunction kernel(const char* name);
// Launches one block of `threads`. `arguments` has the address of the kernel's only parameter.
void launch(CUfunction function, unsigned threads, CUstream stream, const void* arguments);

CUstream makeStream();
CUstream makeStream(int priority);
CUevent makeEvent();

// Words in pinned memory, which begin as 0. The device has them at the same address.
uint32_t* pinnedWords(size_t count);
void store(uint32_t* word, uint32_t value);
uint32_t load(const uint32_t* word);
// Returns whether the word has at least the value before `milliseconds` are over.
bool reaches(const uint32_t* word, uint32_t value, double milliseconds);
inline CUdeviceptr addressOf(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

// Makes a stream wait until the word has at least the value.
void awaitWord(CUstream stream, const uint32_t* word, uint32_t value);
void writeWord(CUstream stream, uint32_t* word, uint32_t value);

// Memory that processes share by file descriptors, in one size.
constexpr size_t kSharedBytes = size_t(2) << 20;
CUmemAllocationProp sharedProperties();
CUmemAccessDesc sharedAccess();
CUdeviceptr mapShared(CUmemGenericAllocationHandle handle);
CUdeviceptr mapShared(int descriptor);

}  // namespace probe
