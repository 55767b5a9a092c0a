#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "base/stop_signal.h"
#include "engine/contract/transport.h"
#include "transfer/metadata.h"
#include "transfer/segment_description.h"

namespace mooncake::transfer {

// Keeps the name of one engine in the metadata server. It publishes the name again after each
// registration and every `period`, so a server that lost all names has this one again within 30 s.
// It takes over a name if no engine answers for it, or if its holder cannot be reached from here and
// has stopped to publish it. Any thread.
class NameKeeper {
 public:
  // Asks a session port which engine listens there. kPeerLost: nothing listens. kSystem: the port
  // cannot be reached from here. Any other error: a program listens there but does not say which
  // engine it is.
  using Ask = std::function<Result<SegmentDescription>(const std::string& session, Deadline)>;
  struct Options {
    std::string name;
    NameRecord record;
    std::string logName;
    std::chrono::milliseconds patience;  // for one attempt to publish
    Clock::duration period =
        std::chrono::seconds(15);  // between attempts; jitter halves it at most
    Clock::duration leastPause = std::chrono::seconds(1);  // between attempts for registrations
  };

  NameKeeper(Metadata& metadata, Ask ask, Options options);
  ~NameKeeper();

  // Blocks until the name leads to our engine, then starts the keeper's thread. kInvalidArgument:
  // another engine has the name.
  Status publish();
  // Publishes again soon, on the keeper's thread.
  void renewSoon();
  // Stops publishing, then deletes our record if it is still there and the server answers. Returns
  // after `patience` at most.
  void retract();
  bool isRetracted() const;

 private:
  void run() EXCLUDES(mutex_);
  Status attempt(Deadline deadline);
  Status checkHolder(const NameRecord& record, Deadline deadline) const;
  void report(const Status& attempted);

  Metadata& metadata_;
  const Ask ask_;
  const Options options_;
  bool wasKept_ = true;  // the last attempt succeeded; used by the keeper's thread only
  Mutex endingMutex_;    // one retract() at a time
  std::thread thread_ GUARDED_BY(endingMutex_);
  bool isPublished_ GUARDED_BY(endingMutex_) = false;
  mutable Mutex mutex_;
  Condition changed_;
  bool isWanted_ GUARDED_BY(mutex_) = false;  // renewSoon() was called since the last attempt began
  bool isRetracted_ GUARDED_BY(mutex_) = false;
};

// Implements NameKeeper::Ask over the session protocol.
Result<SegmentDescription> askHolder(const TransportContext& context, const std::string& session,
                                     Deadline deadline, const StopSignal& stop);

// The incarnation of NameRecord: the id at the start of an engine's endpoint, in hex.
Result<std::string> incarnationOf(ByteView endpoint);

// Ok if the description comes from the engine that the record names, else kPeerLost.
Status checkIdentity(const std::string& name, const NameRecord& record,
                     const SegmentDescription& answer);

}  // namespace mooncake::transfer
