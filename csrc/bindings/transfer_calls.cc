#include "bindings/transfer_calls.h"

#include "base/log.h"
#include "base/mutex.h"

namespace mooncake {
namespace {

using transfer::TransferEngine;
using transfer::TransferRequest;

constexpr const char* kWho = "transfer engine";

// All engines of this process, to be closed before Python's interpreter ends.
Mutex openMutex;
std::vector<std::weak_ptr<TransferEngine>> open GUARDED_BY(openMutex);

void remember(const std::shared_ptr<TransferEngine>& engine) {
  Lock lock(openMutex);
  std::erase_if(open, [](const auto& one) { return one.expired(); });
  open.push_back(engine);
}

}  // namespace

TransferCalls::~TransferCalls() = default;

void TransferCalls::closeAll() {
  std::vector<std::weak_ptr<TransferEngine>> all;
  {
    Lock lock(openMutex);
    all.swap(open);
  }
  for (const auto& one : all) {
    if (const auto engine = one.lock()) engine->close();
  }
}

bool TransferCalls::isReady() const {
  if (engine_) return true;
  log(LogLevel::kWarning, kWho, "a call before initialize()");
  return false;
}

int TransferCalls::initialize(const std::string& localName, const std::string& metadataServer,
                              const std::string& protocol,
                              const std::optional<std::string>& devices) {
  const auto fail = [](const std::string& why) {
    log(LogLevel::kError, kWho, "initialize(): ", why);
    return int(transfer::kInvalid);
  };
  if (engine_) return fail("this engine is initialized already");
  auto env = EngineEnv::read();
  if (!env.ok()) return fail(env.error().message);
  auto engine = TransferEngine::open({.env = std::move(*env),
                                      .localName = localName,
                                      .metadataServer = metadataServer,
                                      .protocol = protocol,
                                      .devices = devices.value_or("")});
  if (!engine.ok()) return fail(engine.error().message);
  engine_ = std::move(*engine);
  remember(engine_);
  return transfer::kGood;
}

int TransferCalls::rpcPort() const { return isReady() ? engine_->rpcPort() : -1; }

uint64_t TransferCalls::allocate(uint64_t bytes) {
  return isReady() ? engine_->allocateManaged(bytes) : 0;
}

int TransferCalls::free(uint64_t address, uint64_t bytes) {
  return isReady() && engine_->freeManaged(address, bytes) == transfer::kGood ? 0 : -1;
}

int TransferCalls::registerMemory(uint64_t address, uint64_t bytes, const std::string& location) {
  return isReady() ? engine_->registerMemory(address, bytes, location) : transfer::kInvalid;
}

int TransferCalls::unregisterMemory(uint64_t address) {
  return isReady() ? engine_->unregisterMemory(address) : transfer::kInvalid;
}

int TransferCalls::registerAll(const Addresses& addresses, const Addresses& bytes,
                               const std::string& location) {
  if (!isReady()) return transfer::kInvalid;
  if (addresses.size() != bytes.size()) {
    log(LogLevel::kWarning, kWho, addresses.size(), " addresses and ", bytes.size(),
        " capacities to register");
    return transfer::kInvalid;
  }
  std::vector<TransferEngine::Range> ranges;
  for (size_t i = 0; i < addresses.size(); ++i) ranges.push_back({addresses[i], bytes[i]});
  return engine_->registerMemory(ranges, location);
}

int TransferCalls::unregisterAll(const Addresses& addresses) {
  return isReady() ? engine_->unregisterMemory(addresses) : transfer::kInvalid;
}

std::optional<std::vector<TransferRequest>> TransferCalls::requests(const std::string& target,
                                                                    const Addresses& buffers,
                                                                    const Addresses& remote,
                                                                    const Addresses& bytes,
                                                                    Opcode opcode) {
  if (!isReady()) return std::nullopt;
  if (buffers.size() != remote.size() || buffers.size() != bytes.size()) {
    log(LogLevel::kWarning, kWho, buffers.size(), " buffers, ", remote.size(),
        " peer addresses and ", bytes.size(), " lengths of one transfer");
    return std::nullopt;
  }
  const auto segment = engine_->openSegment(target);
  if (!segment) return std::nullopt;
  std::vector<TransferRequest> all(buffers.size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = {.opcode = opcode,
              .local = buffers[i],
              .segment = segment,
              .remote = remote[i],
              .bytes = bytes[i]};
  }
  return all;
}

int TransferCalls::transfer(const std::string& target, const Addresses& buffers,
                            const Addresses& remote, const Addresses& bytes, Opcode opcode,
                            const std::optional<Notification>& notification) {
  const auto all = requests(target, buffers, remote, bytes, opcode);
  if (!all || engine_->transfer(*all) != transfer::kGood) return -1;
  if (!notification) return 0;
  return engine_->notify(target, *notification) == transfer::kGood ? 0 : -1;
}

uint64_t TransferCalls::submit(const std::string& target, const Addresses& buffers,
                               const Addresses& remote, const Addresses& bytes, Opcode opcode) {
  const auto all = requests(target, buffers, remote, bytes, opcode);
  const auto batch = all ? engine_->allocateBatch(std::max<size_t>(1, all->size())) : nullptr;
  if (!batch) return 0;
  if (engine_->submit(batch, *all) == transfer::kGood) return batch->id;
  (void)engine_->release(batch->id);
  return 0;
}

Status TransferCalls::transferOnStream(const std::string& target, const Addresses& buffers,
                                       const Addresses& remote, const Addresses& bytes,
                                       Opcode opcode, uint64_t stream) {
  auto all = requests(target, buffers, remote, bytes, opcode);
  if (all) return engine_->transferOnStream(reinterpret_cast<void*>(stream), std::move(*all));
  return {ErrorCode::kInvalidArgument,
          "a transfer on a stream cannot begin: \"" + target +
              "\" cannot be opened, or the lists differ in length. The log says which"};
}

int TransferCalls::awaitAll(const std::vector<uint64_t>& batches) {
  if (!isReady()) return transfer::kInvalid;
  int result = 0;
  for (const uint64_t id : batches) {
    const auto batch = engine_->batch(id);
    if (!batch || engine_->await(*batch) != transfer::kGood) result = -1;
    if (engine_->release(id) != transfer::kGood) result = -1;
  }
  return result;
}

int TransferCalls::check(uint64_t id) {
  constexpr int kDone = 1, kPending = 0, kFailed = -1;
  const auto batch = isReady() ? engine_->batch(id) : nullptr;
  if (batch && !batch->isOver()) return kPending;
  if (!isReady() || engine_->release(id) != transfer::kGood) return kFailed;
  return batch->failed == 0 ? kDone : kFailed;
}

uint64_t TransferCalls::firstBuffer(const std::string& name) {
  return isReady() ? engine_->firstBuffer(name) : 0;
}

int TransferCalls::probe(const std::string& name) {
  return isReady() ? engine_->probe(name) : transfer::kInvalid;
}

int TransferCalls::warmUp(const std::string& name) {
  return isReady() ? engine_->warmUp(name) : transfer::kInvalid;
}

std::string TransferCalls::transportTo(const std::string& name) {
  return isReady() ? engine_->transportTo(name) : "";
}

std::vector<transfer::Notification> TransferCalls::takeNotifications() {
  return isReady() ? engine_->takeNotifications() : std::vector<Notification>();
}

int TransferCalls::writeHere(uint64_t address, const std::string& bytes, uint64_t length) {
  if (!isReady()) return transfer::kInvalid;
  if (length > bytes.size()) {
    log(LogLevel::kWarning, kWho, "write_bytes_to_buffer(): length ", length, " exceeds the ",
        bytes.size(), " bytes given");
    return transfer::kInvalid;
  }
  return engine_->writeHere(address, std::as_bytes(std::span(bytes)).first(length));
}

std::optional<std::string> TransferCalls::readHere(uint64_t address, uint64_t bytes) {
  if (!isReady() || !engine_->holds(address, bytes)) return std::nullopt;
  std::string read(bytes, '\0');
  if (engine_->readHere(address, std::as_writable_bytes(std::span(read))) != transfer::kGood)
    return std::nullopt;
  return read;
}

}  // namespace mooncake
