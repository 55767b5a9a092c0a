#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "base/stop_signal.h"
#include "transfer/segment_description.h"
#include "wires/stream/handshake_listener.h"

namespace mooncake::transfer {

// Engine id that means "the engine at this session port": the asking side does not know yet which
// engine that is.
inline constexpr EngineId kSessionListener = {std::byte{'s'}, std::byte{'e'}, std::byte{'s'},
                                              std::byte{'s'}, std::byte{'i'}, std::byte{'o'},
                                              std::byte{'n'}};

// Answers questions at the session port, from peers that prove that they know the key. Runs on the
// engine's loop. A connection carries one question and one answer. Their size, number and time are
// bounded.
class SessionServer : public std::enable_shared_from_this<SessionServer> {
 public:
  static constexpr size_t kMostConversations = 1024;

  // Returns an encoded SegmentDescription, or null for no answer. Called on the loop's thread.
  using Describe = std::function<std::shared_ptr<const Bytes>()>;

  // `context.id` is kSessionListener. `context` must outlive the loop's handlers.
  static Result<std::shared_ptr<SessionServer>> start(const TransportContext& context, Fd listener,
                                                      Describe describe);
  // Ends all conversations before it returns. Must not be called on the loop's thread.
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
  // Used by the loop's thread only.
  bool isStopped_ = false;
  std::set<std::string> strangers_;  // errors of failed handshakes that have been logged
  std::map<Conversation*, std::shared_ptr<Conversation>> conversations_;
};

// Asks the engine at a session port. `context.id` is this engine's id. Blocks until the answer
// arrives or the deadline passes; kAborted if `stop` comes first.
Result<SegmentDescription> askSession(const TransportContext& context, const std::string& session,
                                      const Question& question, Deadline deadline,
                                      const StopSignal* stop = nullptr);

}  // namespace mooncake::transfer
