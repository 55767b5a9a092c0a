// The parts of bench_proxy.py that need a GPU. Prints a line of JSON for each row:
//   proxy_gpu queue COUNT      the ring alone, by the place of its memory and its producers
//   proxy_gpu copies BYTES     copies between two GPUs, or within one, by the number of blocks
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "device/accelerators.h"
#include "device/peer_memory.h"
#include "kernels/proxy/proxy.cuh"
#include "proxy/command_ring.h"
#include "proxy/proxy_memory.h"

namespace mooncake::proxy {
namespace {

using kernels::ProxyCommand;
using kernels::ProxyCounts;
using kernels::ProxyTickets;
using kernels::ProxyView;

constexpr uint32_t kSlots = 1024;

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "proxy_gpu: %s\n", why.c_str());
  std::exit(1);
}

void check(cudaError_t result) {
  if (result != cudaSuccess) die(cudaGetErrorString(result));
}

double secondsSince(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

template <typename T>
T* managed(size_t count) {
  void* memory = nullptr;
  check(cudaMallocManaged(&memory, count * sizeof(T)));
  return new (memory) T[count]();
}

std::span<std::byte> clearedTickets() {
  void* memory = nullptr;
  check(cudaMalloc(&memory, sizeof(ProxyTickets)));
  check(cudaMemset(memory, 0, sizeof(ProxyTickets)));
  return {static_cast<std::byte*>(memory), sizeof(ProxyTickets)};
}

// ---- the ring alone

// Each block is a producer of one thread.
__global__ void push(ProxyView view, unsigned each, unsigned* refused) {
  for (unsigned i = 0; i < each; ++i) {
    const auto ticket = kernels::put(view, 0, {0, 0, 0, 0, 64});
    if (ticket.result != kernels::ProxyResult::kDone) atomicAdd(refused, 1u);
  }
  if (kernels::flush(view, 0) != kernels::ProxyResult::kDone) atomicAdd(refused, 1u);
}

void measure(const char* name, ProxyView view, CommandRing ring, unsigned count) {
  view.timeoutNs = 10'000'000'000;
  auto* const refused = managed<unsigned>(1);
  for (const unsigned producers : {1u, 4u, 32u}) {
    std::atomic<bool> isOver{false};
    std::thread taker([&] {
      ProxyCommand one;
      while (!isOver) {
        uint32_t lot = 0;
        while (lot < kSlots / 4 && ring.take(one)) ++lot;
        if (lot == 0) continue;
        ring.publishTaken();
        ring.complete(lot);
      }
    });
    const auto began = std::chrono::steady_clock::now();
    push<<<producers, 1>>>(view, count / producers, refused);
    check(cudaDeviceSynchronize());
    const double rate = double(count / producers * producers) / secondsSince(began);
    isOver = true;
    taker.join();
    if (*refused != 0) die(std::string(name) + ": commands were refused");
    std::printf("{\"queue\": \"%s\", \"producers\": %u, \"per_s\": %.0f}\n", name, producers, rate);
    std::fflush(stdout);
  }
  check(cudaFree(refused));
}

void queue(unsigned count) {
  const auto cuda = openAccelerator("cuda");
  if (!cuda.ok()) die(cuda.error().message);
  check(cudaSetDevice(0));
  check(cudaFree(nullptr));  // makes the context
  PeerMemory& peers = *(*cuda)->peerMemory();
  auto counted = peers.allocateShared(0, sizeof(ProxyCounts));
  if (!counted.ok()) die(counted.error().message);
  check(cudaMemset(counted->memory.data(), 0, sizeof(ProxyCounts)));
  for (const bool isMapped : {false, true}) {
    const auto tickets = clearedTickets();
    const auto counts = isMapped ? counted->memory : std::span<std::byte>();
    auto memory = ProxyMemory::create(*cuda, 1, kSlots, 1, tickets, counts);
    if (!memory.ok()) die(memory.error().message);
    if (!isMapped) {
      measure("pinned", (*memory)->view(), (*memory)->ringOf(0), count);
    } else if ((*memory)->countsMapped().ok()) {
      measure("GDRCopy", (*memory)->view(), (*memory)->ringOf(0), count);
    } else {
      std::printf("{\"queue\": \"GDRCopy\", \"why\": \"needs GDRCopy\"}\n");
    }
    check(cudaFree(tickets.data()));
  }
  const auto tickets = clearedTickets();
  ProxyView view{};
  view.commands = managed<ProxyCommand>(kSlots);
  ProxyCounts* const counts = managed<ProxyCounts>(1);
  view.counts = counts;
  view.tickets = reinterpret_cast<ProxyTickets*>(tickets.data());
  view.signals = managed<uint64_t>(1);
  view.peers = view.signalWords = 1;
  view.slots = kSlots;
  measure("managed", view, CommandRing({view.commands, kSlots}, *counts), count);
}

// ---- copies

__global__ void copyAll(const uint4* from, uint4* to, size_t count) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
    to[i] = from[i];
}

// The kernel runs on the first device and writes to the second one, as kernels publish data.
void copies(size_t bytes) {
  constexpr unsigned kThreads = 512;
  constexpr int kTimes = 5;
  int devices = 0, reaches = 0, multiprocessors = 0;
  check(cudaGetDeviceCount(&devices));
  if (devices > 1) check(cudaDeviceCanAccessPeer(&reaches, 0, 1));
  const int target = reaches != 0 ? 1 : 0;
  void *from = nullptr, *to = nullptr;
  check(cudaSetDevice(target));
  check(cudaMalloc(&to, bytes));
  check(cudaSetDevice(0));
  if (target != 0) check(cudaDeviceEnablePeerAccess(target, 0));
  check(cudaMalloc(&from, bytes));
  check(cudaMemset(from, 1, bytes));
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  std::vector<unsigned> grids;
  for (unsigned blocks = 1; blocks < unsigned(multiprocessors); blocks *= 2)
    grids.push_back(blocks);
  grids.push_back(unsigned(multiprocessors));
  cudaEvent_t begun, ended;
  check(cudaEventCreate(&begun));
  check(cudaEventCreate(&ended));
  for (const unsigned blocks : grids) {
    const auto run = [&] {
      copyAll<<<blocks, kThreads>>>(static_cast<const uint4*>(from), static_cast<uint4*>(to),
                                    bytes / sizeof(uint4));
      check(cudaGetLastError());
    };
    run();
    check(cudaEventRecord(begun));
    for (int i = 0; i < kTimes; ++i) run();
    check(cudaEventRecord(ended));
    check(cudaEventSynchronize(ended));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begun, ended));
    std::printf("{\"to\": %d, \"blocks\": %u, \"gb_per_s\": %.2f}\n", target, blocks,
                double(bytes) * kTimes / double(ms) / 1e6);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace mooncake::proxy

int main(int count, char** words) {
  const std::string part = count > 2 ? words[1] : "";
  const uint64_t number = count > 2 ? std::strtoull(words[2], nullptr, 10) : 0;
  if (part == "queue") {
    mooncake::proxy::queue(unsigned(number));
  } else if (part == "copies") {
    mooncake::proxy::copies(number);
  } else {
    std::fprintf(stderr, "use: proxy_gpu queue COUNT | copies BYTES\n");
    return 2;
  }
  return 0;
}
