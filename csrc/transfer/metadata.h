#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/result.h"
#include "transfer/transfer_env.h"

namespace mooncake::transfer {

// An engine's entry in a metadata server.
struct NameRecord {
  std::string session;      // host:port of the engine's session port
  std::string incarnation;  // the engine's id, in hex; empty: the record does not say
  bool isOurMake = true;    // false: an engine of Mooncake wrote it; its wire protocol is not ours
  std::string tag;          // version of the record in the server; empty: the server has none
  // Time since an engine last wrote the record. Empty: the server does not say.
  std::optional<std::chrono::seconds> age{};
};

// Maps the name of a segment to the session port of an engine.
class Metadata {
 public:
  // "P2PHANDSHAKE": names are session ids themselves. "http://host:port/metadata": names are in a
  // metadata server. kUnsupported: another kind of server, or libcurl is missing.
  static Result<std::unique_ptr<Metadata>> open(const TransferEnv& env, const std::string& server);
  virtual ~Metadata() = default;

  virtual bool namesAreSessions() const = 0;
  // kMismatch: the name has no record, or the server does not answer; kProtocol: the record does
  // not decode.
  virtual Result<NameRecord> find(const std::string& name, Deadline deadline) const = 0;
  // Writes our record if there is none, or replaces `seen`. False: another record is there.
  virtual Result<bool> put(const std::string& name, const NameRecord& record,
                           const NameRecord* seen, Deadline deadline) = 0;
  // Deletes this record, but no other record of the same name.
  virtual void erase(const std::string& name, const NameRecord& record, Deadline deadline) = 0;
};

}  // namespace mooncake::transfer
