#include <cstdio>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "device.h"
#include "driver.h"
#include "kernels.h"
#include "parts.h"
#include "processes.h"

namespace probe {
namespace {

constexpr double kFirstMs = 5000;  // for the first barrier, which waits for all kernels to start
constexpr unsigned kMeasuredUs = 2'000'000;
constexpr unsigned kTailUs = 200'000;  // others go on while rank 0 reads its numbers

void measure(const BarrierArguments& a) {
  if (!reaches(a.progress, 1, kFirstMs)) {
    std::printf("[barrier] %d processes: rank %d has NO barrier within %.0f s\n", a.ranks, a.rank,
                kFirstMs / 1e3);
    return;
  }
  const uint32_t before = load(a.progress);
  ::usleep(kMeasuredUs);
  const uint32_t count = load(a.progress) - before;
  if (a.rank != 0) return;
  const double longest = load(a.progress + 1) / 1e3;
  if (count == 0) {
    std::printf("[barrier] %d processes: more than %.0f ms each\n", a.ranks, kMeasuredUs / 1e3);
  } else {
    std::printf("[barrier] %d processes: %.4f ms each, the longest %.1f ms, of %u\n", a.ranks,
                kMeasuredUs / 1e3 / count, longest, count);
  }
}

// Shares a page with all other ranks. The parent hands the descriptors round.
void runRank(int link, int rank, int ranks) {
  openDevice();
  const CUfunction function = kernel("barriers");
  const CUmemAllocationProp properties = sharedProperties();
  CUmemGenericAllocationHandle handle = 0;
  int descriptor = -1;
  CHECKED(driver.cuMemCreate(&handle, kSharedBytes, &properties, 0));
  CHECKED(driver.cuMemExportToShareableHandle(&descriptor, handle,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CHECKED(driver.cuMemsetD8(mapShared(handle), 0, kSharedBytes));
  CHECKED(driver.cuCtxSynchronize());
  sendDescriptor(link, descriptor);
  uint32_t* const words = pinnedWords(3);
  BarrierArguments arguments{
      .pages = {}, .rank = rank, .ranks = ranks, .stop = words, .progress = words + 1};
  for (int i = 0; i < ranks; ++i) {
    const int theirs = receiveDescriptor(link);
    arguments.pages[i] = reinterpret_cast<uint32_t*>(mapShared(theirs));
    ::close(theirs);
  }
  CUstream stream = makeStream();
  char byte = 0;
  sendBytes(link, &byte, 1);     // this rank is ready
  receiveBytes(link, &byte, 1);  // all ranks are
  launch(function, 512, stream, &arguments);
  measure(arguments);
  ::usleep(kTailUs);
  store(words, 1);
  CHECKED(driver.cuStreamSynchronize(stream));
}

}  // namespace

void barrier(int ranks) {
  std::vector<Link> links;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < ranks; ++rank) {
    links.push_back(makeLink());
    const int far = links.back().far;
    processes.push_back(start([=] { runRank(far, rank, ranks); }, false));
    ::close(far);
  }
  std::vector<int> descriptors;
  for (const Link& link : links) descriptors.push_back(receiveDescriptor(link.near));
  for (const Link& link : links)
    for (int descriptor : descriptors) sendDescriptor(link.near, descriptor);
  char byte = 0;
  for (const Link& link : links) receiveBytes(link.near, &byte, 1);
  for (const Link& link : links) sendBytes(link.near, &byte, 1);
  for (pid_t process : processes)
    if (finish(process, 15) != 0) std::printf("[barrier] %d processes: a rank failed\n", ranks);
}

}  // namespace probe
