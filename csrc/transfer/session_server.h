#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/stop_signal.h"
#include "engine/stream/handshake_listener.h"
#include "transfer/segment_description.h"

namespace mooncake::transfer {

// The engine id that stands for "whoever listens at this session port": who asks does not know yet
// which engine that is.
inline constexpr EngineId kSessionListener = {std::byte{'s'}, std::byte{'e'}, std::byte{'s'},
                                              std::byte{'s'}, std::byte{'i'}, std::byte{'o'},
                                              std::byte{'n'}};

// Answers at the session port who this engine is, to those that prove that they know its key. On
// the engine's loop: one question and one answer per connection, bounded in size, in number and in
// time.
class SessionServer : public std::enable_shared_from_this<SessionServer> {
 public:
  static constexpr size_t kMostConversations = 1024;

  // An encoded SegmentDescription; null: no answer. On the loop's thread.
  using Describe = std::function<std::shared_ptr<const Bytes>()>;

  // The context's id is kSessionListener; it outlives the loop's handlers.
  static Result<std::shared_ptr<SessionServer>> start(const TransportContext& context, Fd listener,
                                                      Describe describe);
  // Nobody is answered any more when this returns. Not on the loop's thread.
  void stop();

 private:
  class Conversation;
  SessionServer(const TransportContext& context, Describe describe)
      : context_(context), describe_(std::move(describe)) {}
  void onHandshake(Result<Handshaken> result);
  void drop(Conversation* conversation);

  const TransportContext& context_;
  const Describe describe_;
  std::shared_ptr<HandshakeListener> listener_;
  // Of the loop's thread.
  bool isStopped_ = false;
  std::set<std::string> strangers_;  // that have been logged
  std::map<Conversation*, std::shared_ptr<Conversation>> conversations_;
};

// Asks at a session port. The context's id is the own engine's. Blocks until the answer is there,
// at most until the deadline, or until `stop`: kAborted.
Result<SegmentDescription> askSession(const TransportContext& context, const std::string& session,
                                      const Question& question, Deadline deadline,
                                      const StopSignal* stop = nullptr);

}  // namespace mooncake::transfer
