#include "wires/inproc/inproc_transport.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <unistd.h>

#include "engine/memory/gate.h"
#include "engine/memory/program_memory.h"
#include "wires/local/local_transport.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace mooncake {
namespace {

// The two engines map the gate's page at two addresses, so ThreadSanitizer takes it for two gates.
// These calls tell it the order that the gate gives: a reader leaves before the owner's close()
// ends.
void leavesTable([[maybe_unused]] RegionTable& table) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(&table);
#endif
}
void allLeftTable([[maybe_unused]] RegionTable& table) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(&table);
#endif
}

// Greeting, wire form:  u64 address of the region table  u64 offset of its gate in the arena  zeros

// Reads through the peer's region table. The peer may end at any time, and its table with it. The
// gate in its arena, which we keep mapped, says whether the table still exists. While we are inside
// the gate, the table stays.
class InprocReader final : public DirectReader {
 public:
  InprocReader(Gate& gate, RegionTable& table) : gate_(gate), table_(table) {}

  ErrorCode read(const RemoteRegion& region, uint64_t offset,
                 std::span<std::byte> target) override {
    const Gate::Pass pass(gate_);
    if (!pass) return ErrorCode::kUnsupported;  // the goodbye on the socket tells the reason
    const ErrorCode code = readThroughTable(region, offset, target);
    leavesTable(table_);
    return code;
  }

 private:
  ErrorCode readThroughTable(const RemoteRegion& region, uint64_t offset,
                             std::span<std::byte> target) {
    const auto use = table_.open(region.key, offset, target.size(), kRemoteRead);
    if (!use) return ErrorCode::kRefused;
    if (use.isOfProgram()) {
      const bool isThere = copyIfMapped(target.data(), use.data(), target.size());
      // If a side is unmapped, the get over the stream tells which one.
      return isThere ? ErrorCode::kOk : ErrorCode::kUnsupported;
    }
    std::memcpy(target.data(), use.data(), target.size());
    return ErrorCode::kOk;
  }

  Gate& gate_;
  RegionTable& table_;
};

class InprocWire final : public LocalWire {
 public:
  InprocWire(ArenaBlock gatePage, RegionTable& table)
      : gatePage_(std::move(gatePage)), gate_(*new (gatePage_.data()) Gate), table_(table) {}

  const char* name() const override { return "inproc"; }
  bool leadsTo(pid_t process) const override { return process == ::getpid(); }
  Greeting greeting() const override {
    const Bytes bytes = ByteWriter()
                            .put(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&table_)))
                            .put(gatePage_.offset())
                            .take();
    Greeting greeting{};
    std::copy(bytes.begin(), bytes.end(), greeting.begin());
    return greeting;
  }
  // Only here do we follow an address from a peer: the kernel has said that the peer is this
  // process, and the handshake has proved that it knows the job's key.
  std::unique_ptr<DirectReader> reader(pid_t, const Greeting& greeting,
                                       const ArenaMapping& arena) const override {
    ByteReader in(greeting);
    const auto table = in.get<uint64_t>();
    const auto gateOffset = in.get<uint64_t>();
    if (table == 0 || gateOffset % alignof(Gate) != 0 || gateOffset > arena.capacity() ||
        sizeof(Gate) > arena.capacity() - gateOffset) {
      return nullptr;
    }
    return std::make_unique<InprocReader>(*reinterpret_cast<Gate*>(arena.base() + gateOffset),
                                          *reinterpret_cast<RegionTable*>(table));
  }
  void shutdown() override {
    gate_.close();
    allLeftTable(table_);
  }

 private:
  const ArenaBlock gatePage_;
  Gate& gate_;
  RegionTable& table_;
};

}  // namespace

Result<std::unique_ptr<Transport>> InprocTransport::create(const TransportContext& context) {
  auto page = context.arena.allocate(sizeof(Gate));
  if (!page.ok()) return page.error();
  return LocalTransport::create(context,
                                std::make_unique<InprocWire>(std::move(*page), context.regions));
}

}  // namespace mooncake
