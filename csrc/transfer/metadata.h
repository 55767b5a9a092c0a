#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/result.h"
#include "base/transfer_env.h"

namespace mooncake::transfer {

// Where the names of segments lead: to the session port of an engine.
class Metadata {
 public:
  // "P2PHANDSHAKE": names are session ids themselves. "http://host:port/metadata": they are in a
  // metadata server. kUnsupported names what is not there.
  static Result<std::unique_ptr<Metadata>> open(const TransferEnv& env, const std::string& server);
  virtual ~Metadata() = default;

  virtual bool namesAreSessions() const = 0;
  virtual Result<std::string> sessionOf(const std::string& name, Deadline deadline) const = 0;
  // What our own name leads to from now on.
  virtual Status publish(const std::string& name, const std::string& session,
                         Deadline deadline) = 0;
  virtual void retract(const std::string& name, Deadline deadline) = 0;
};

}  // namespace mooncake::transfer
