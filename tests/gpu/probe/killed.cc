#include <csignal>
#include <cstdio>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "clock.h"
#include "device.h"
#include "driver.h"
#include "kernels.h"
#include "parts.h"
#include "processes.h"

namespace probe {
namespace {

constexpr size_t kCount = kSharedBytes / sizeof(uint32_t);

// Writes words that count up from 0.
void fill(CUdeviceptr memory) {
  std::vector<uint32_t> words(kCount);
  for (size_t i = 0; i < kCount; ++i) words[i] = uint32_t(i);
  CHECKED(driver.cuMemcpyHtoD(memory, words.data(), kSharedBytes));
  CHECKED(driver.cuCtxSynchronize());
}

[[noreturn]] void stayUntilKilled() {
  for (;;) ::pause();
}

void ownShared(int link) {
  openDevice();
  const CUmemAllocationProp properties = sharedProperties();
  CUmemGenericAllocationHandle handle = 0;
  int descriptor = -1;
  CHECKED(driver.cuMemCreate(&handle, kSharedBytes, &properties, 0));
  CHECKED(driver.cuMemExportToShareableHandle(&descriptor, handle,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  fill(mapShared(handle));
  sendDescriptor(link, descriptor);
  stayUntilKilled();
}

void ownPlain(int link) {
  openDevice();
  CUdeviceptr memory = 0;
  CUipcMemHandle handle{};
  CHECKED(driver.cuMemAlloc(&memory, kSharedBytes));
  CHECKED(driver.cuIpcGetMemHandle(&handle, memory));
  fill(memory);
  sendBytes(link, &handle, sizeof(handle));
  stayUntilKilled();
}

void killOwner(pid_t owner) {
  ::kill(owner, SIGKILL);
  ::waitpid(owner, nullptr, 0);
}

// Returns whether the context still works.
const char* state() {
  CUdeviceptr memory = 0;
  const CUresult result = driver.cuMemAlloc(&memory, 4096);
  return nameOf(result);
}

}  // namespace

void killedWhileRead() {
  const Link link = makeLink();
  const pid_t owner = start([&] { ownShared(link.far); }, false);
  ::close(link.far);  // so a receive fails at once if the owner ends
  openDevice();
  const CUfunction read = kernel("read");
  const int descriptor = receiveDescriptor(link.near);
  const CUdeviceptr memory = mapShared(descriptor);
  ::close(descriptor);
  uint32_t* const words = pinnedWords(3);
  const ReadArguments arguments{.data = reinterpret_cast<const uint32_t*>(memory),
                                .count = kCount,
                                .stop = words,
                                .wrong = words + 1,
                                .passes = words + 2};
  CUstream stream = makeStream();
  launch(read, 512, stream, &arguments);
  const bool isReading = reaches(words + 2, 1, 5000);
  killOwner(owner);
  const uint32_t before = load(words + 2);
  ::usleep(500'000);
  const uint32_t after = load(words + 2) - before;
  store(words, 1);
  const CUresult ended = driver.cuStreamSynchronize(stream);
  std::printf(
      "[killed] a kernel reads shared memory (VMM): it read %s the death, %u times after it, "
      "%u wrong words; it ends with %s; the context: %s\n",
      isReading ? "before" : "NOT before", after, load(words + 1), nameOf(ended), state());
}

void killedWhileCopied() {
  const Link link = makeLink();
  const pid_t owner = start([&] { ownPlain(link.far); }, false);
  ::close(link.far);  // so a receive fails at once if the owner ends
  openDevice();
  CUipcMemHandle handle{};
  receiveBytes(link.near, &handle, sizeof(handle));
  CUdeviceptr theirs = 0, ours = 0;
  CHECKED(driver.cuIpcOpenMemHandle(&theirs, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  CHECKED(driver.cuMemAlloc(&ours, kSharedBytes));
  uint32_t* const host = pinnedWords(kCount);
  CUstream stream = makeStream();
  // Many copies are on their way when the owner dies, and more are enqueued after that.
  CUresult result = CUDA_SUCCESS;
  const auto copyMany = [&] {
    for (int i = 0; i < 2000 && result == CUDA_SUCCESS; ++i)
      result = driver.cuMemcpyAsync(ours, theirs, kSharedBytes, stream);
  };
  copyMany();
  killOwner(owner);
  copyMany();
  if (result == CUDA_SUCCESS)
    result = driver.cuMemcpyAsync(addressOf(host), ours, kSharedBytes, stream);
  const CUresult ended = driver.cuStreamSynchronize(stream);
  size_t wrong = 0;
  for (size_t i = 0; i < kCount; ++i) wrong += host[i] != uint32_t(i);
  std::printf(
      "[killed] the device copies memory of CUDA IPC: calls %s, the stream ends with %s, %zu "
      "wrong words; the context: %s\n",
      nameOf(result), nameOf(ended), wrong, state());
}

}  // namespace probe
