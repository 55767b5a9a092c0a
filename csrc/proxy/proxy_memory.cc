#include "proxy/proxy_memory.h"

#include <cstring>
#include <new>
#include <string>

#include "device/peer_memory.h"

namespace mooncake::proxy {

using kernels::ProxyCommand;
using kernels::ProxyCounts;
using kernels::ProxyTickets;

namespace {

constexpr size_t kAlignment = 64;
static_assert(alignof(ProxyCommand) == kAlignment && alignof(ProxyCounts) == kAlignment &&
              alignof(ProxyTickets) == kAlignment && alignof(Doorbell) == kAlignment);

Result<std::span<std::byte>> allocate(Accelerator* accelerator, size_t bytes) {
  if (accelerator) return accelerator->allocatePinned(bytes);
  auto* const memory = static_cast<std::byte*>(::operator new(bytes, std::nothrow));
  if (!memory) {
    return {ErrorCode::kExhausted, "a proxy's rings take " + std::to_string(bytes) +
                                       " bytes, and there is no memory: ask for fewer slots"};
  }
  return std::span(memory, bytes);
}

// Memory of the caller for one record a rank.
Status check(const char* name, std::span<std::byte> memory, uint32_t ranks, size_t bytes) {
  if (memory.empty()) return {};
  if (memory.size() >= bytes && reinterpret_cast<uintptr_t>(memory.data()) % kAlignment == 0)
    return {};
  return {ErrorCode::kInvalidArgument, std::string("the ") + name + " of " + std::to_string(ranks) +
                                           " ranks take " + std::to_string(bytes) +
                                           " bytes, aligned to 64: pass more memory"};
}

}  // namespace

Result<std::unique_ptr<ProxyMemory>> ProxyMemory::create(Accelerator* accelerator, uint32_t ranks,
                                                         uint32_t slots, uint32_t signalWords,
                                                         std::span<std::byte> tickets,
                                                         std::span<std::byte> counts) {
  const size_t ticketBytes = ranks * sizeof(ProxyTickets);
  MOONCAKE_TRY(check("tickets", tickets, ranks, ticketBytes));
  MOONCAKE_TRY(check("counts", counts, ranks, ranks * sizeof(ProxyCounts)));
  const size_t commandBytes = size_t(ranks) * slots * sizeof(ProxyCommand);
  const size_t countBytes = ranks * sizeof(ProxyCounts);
  const size_t signalBytes = sizeof(Doorbell) + size_t(ranks) * signalWords * sizeof(uint64_t);
  const size_t all =
      signalBytes + commandBytes + countBytes + (tickets.empty() ? ticketBytes : 0) + kAlignment;
  const auto pinned = allocate(accelerator, all);
  if (!pinned.ok()) return pinned.error();
  std::memset(pinned->data(), 0, pinned->size());
  std::unique_ptr<ProxyMemory> made(new ProxyMemory(accelerator, *pinned));
  const auto first = reinterpret_cast<uintptr_t>(pinned->data());
  std::byte* next = pinned->data() + (kAlignment - first % kAlignment) % kAlignment;
  const auto take = [&next](size_t bytes) {
    std::byte* const at = next;
    next += bytes;
    return at;
  };
  kernels::ProxyView& view = made->view_;
  view.commands = reinterpret_cast<ProxyCommand*>(take(commandBytes));
  view.counts = made->counts_ = reinterpret_cast<ProxyCounts*>(take(countBytes));
  view.tickets =
      reinterpret_cast<ProxyTickets*>(tickets.empty() ? take(ticketBytes) : tickets.data());
  made->signals_ = {take(signalBytes), signalBytes};
  new (made->signals_.data()) Doorbell;
  view.signals = reinterpret_cast<uint64_t*>(made->signals_.data() + sizeof(Doorbell));
  view.peers = ranks;
  view.slots = slots;
  view.signalWords = signalWords;
  if (accelerator && !counts.empty()) made->mapCounts(counts.first(countBytes));
  return made;
}

void ProxyMemory::mapCounts(std::span<std::byte> counts) {
  PeerMemory* const memory = accelerator_->peerMemory();
  if (!memory) return;
  const auto mapped = memory->mapForHost(counts);
  countsMapped_ = mapped.status();
  if (!mapped.ok()) return;
  mappedCounts_ = *mapped;
  counts_ = reinterpret_cast<ProxyCounts*>(mapped->data());
  view_.counts = reinterpret_cast<ProxyCounts*>(counts.data());
  view_.countLookNs = 0;
}

ProxyMemory::~ProxyMemory() {
  if (!mappedCounts_.empty()) accelerator_->peerMemory()->unmapForHost(mappedCounts_);
  if (accelerator_) {
    accelerator_->freePinned(pinned_);
  } else {
    ::operator delete(pinned_.data());
  }
}

CommandRing ProxyMemory::ringOf(uint32_t peer) const {
  return {{view_.commands + size_t(peer) * view_.slots, view_.slots},
          counts_[peer],
          countsMapped_.ok()};
}

}  // namespace mooncake::proxy
