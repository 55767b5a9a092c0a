#include "wires/shm/shm_transport.h"

#include <algorithm>

#include "base/log.h"
#include "wires/local/local_transport.h"
#include "wires/shm/cross_memory.h"

namespace mooncake {
namespace {

// Greeting, wire form:  u64 address of the nonce  nonce[32]  zeros
Greeting encodeProof(const CrossMemoryProof& proof) {
  const Bytes bytes = ByteWriter().put(proof.address).putRaw(proof.nonce).take();
  Greeting greeting{};
  std::copy(bytes.begin(), bytes.end(), greeting.begin());
  return greeting;
}

CrossMemoryProof decodeProof(const Greeting& greeting) {
  ByteReader in(greeting);
  CrossMemoryProof proof;
  proof.address = in.get<uint64_t>();
  const auto nonce = in.getRaw(proof.nonce.size());
  std::copy(nonce.begin(), nonce.end(), proof.nonce.begin());
  return proof;
}

class ShmWire final : public LocalWire {
 public:
  explicit ShmWire(bool crossMemoryAttach) : crossMemoryAttach_(crossMemoryAttach) {}

  const char* name() const override { return "shm"; }
  bool leadsTo(pid_t) const override { return true; }  // a memfd reaches the same peers
  Greeting greeting() const override {
    return encodeProof({.address = reinterpret_cast<uintptr_t>(nonce_.get()), .nonce = *nonce_});
  }
  std::unique_ptr<DirectReader> reader(pid_t process, const Greeting& greeting,
                                       const ArenaMapping&) const override {
    if (!crossMemoryAttach_) return nullptr;
    auto memory = CrossMemory::open(process, decodeProof(greeting));
    if (memory.ok()) return std::move(*memory);
    log(LogLevel::kInfo, name(), memory.error().message, "; large gets go over the socket");
    return nullptr;
  }

 private:
  const bool crossMemoryAttach_;
  const std::unique_ptr<const Nonce> nonce_ = std::make_unique<const Nonce>(Crypto::randomNonce());
};

}  // namespace

Result<std::unique_ptr<Transport>> ShmTransport::create(const TransportContext& context) {
  return LocalTransport::create(context, std::make_unique<ShmWire>(context.env.crossMemoryAttach));
}

}  // namespace mooncake
