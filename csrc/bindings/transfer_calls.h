#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transfer/transfer_engine.h"

namespace mooncake {

// A TransferEngine with the names, defaults and results of Mooncake's Python class. Success is 0
// and failure negative; where a positive number is success, failure is 0. Called without Python's
// lock.
class TransferCalls {
 public:
  using Notification = transfer::Notification;
  using Opcode = transfer::Opcode;
  using Addresses = std::vector<uint64_t>;

  ~TransferCalls();

  int initialize(const std::string& localName, const std::string& metadataServer,
                 const std::string& protocol, const std::optional<std::string>& devices);
  int rpcPort() const;

  uint64_t allocate(uint64_t bytes);
  int free(uint64_t address, uint64_t bytes);
  int registerMemory(uint64_t address, uint64_t bytes, const std::string& location);
  int unregisterMemory(uint64_t address);
  int registerAll(const Addresses& addresses, const Addresses& bytes, const std::string& location);
  int unregisterAll(const Addresses& addresses);

  // The four kinds of transfer in one call. Returns -1 if the lists differ in length.
  int transfer(const std::string& target, const Addresses& buffers, const Addresses& remote,
               const Addresses& bytes, Opcode opcode,
               const std::optional<Notification>& notification);
  uint64_t submit(const std::string& target, const Addresses& buffers, const Addresses& remote,
                  const Addresses& bytes, Opcode opcode);
  // Ordered on the stream: see TransferEngine::transferOnStream().
  Status transferOnStream(const std::string& target, const Addresses& buffers,
                          const Addresses& remote, const Addresses& bytes, Opcode opcode,
                          uint64_t stream);
  int awaitAll(const std::vector<uint64_t>& batches);
  int check(uint64_t batch);

  uint64_t firstBuffer(const std::string& name);
  int probe(const std::string& name);
  int warmUp(const std::string& name);
  std::string transportTo(const std::string& name);
  std::vector<Notification> takeNotifications();
  int writeHere(uint64_t address, const std::string& bytes, uint64_t length);
  // Empty if the range is not registered or not mapped.
  std::optional<std::string> readHere(uint64_t address, uint64_t bytes);

  // Null before initialize().
  const std::shared_ptr<transfer::TransferEngine>& engine() const { return engine_; }

  // Closes every open engine of this process, which tells its peers goodbye. Called when the
  // program ends.
  static void closeAll();

 private:
  bool isReady() const;
  std::optional<std::vector<transfer::TransferRequest>> requests(const std::string& target,
                                                                 const Addresses& buffers,
                                                                 const Addresses& remote,
                                                                 const Addresses& bytes,
                                                                 Opcode opcode);

  std::shared_ptr<transfer::TransferEngine> engine_;
};

}  // namespace mooncake
