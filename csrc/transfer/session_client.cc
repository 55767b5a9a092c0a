#include <cerrno>
#include <chrono>
#include <poll.h>
#include <sys/socket.h>

#include "base/backoff.h"
#include "transfer/session_server.h"
#include "transfer/session_socket.h"

namespace mooncake::transfer {
namespace {

// A broken connection does not show that the peer is gone, so the question is asked again: it has
// no side effect. A peer that is gone refuses the next connection.
constexpr int kMostAttempts = 4;
constexpr auto kFirstPause = std::chrono::milliseconds(10);

Error at(const std::string& session, const Error& error) {
  return {error.code, session + ": " + error.message};
}

Status sendAll(int socket, ByteView bytes, Deadline deadline, const StopSignal* stop) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      bytes = bytes.subspan(size_t(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      MOONCAKE_TRY(await(socket, POLLOUT, deadline, stop));
    } else if (errno != EINTR) {
      return {ErrorCode::kPeerLost, systemError("send", errno).message};
    }
  }
  return {};
}

Status receiveAll(int socket, std::span<std::byte> bytes, Deadline deadline,
                  const StopSignal* stop) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) {
      bytes = bytes.subspan(size_t(got));
    } else if (got == 0) {
      return {ErrorCode::kPeerLost, "it hung up without an answer"};
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      MOONCAKE_TRY(await(socket, POLLIN, deadline, stop));
    } else if (errno != EINTR) {
      return {ErrorCode::kPeerLost, systemError("recv", errno).message};
    }
  }
  return {};
}

Result<Fd> shakeHands(Fd socket, const TransportContext& context, Deadline deadline,
                      const StopSignal* stop) {
  HandshakeConnector handshake(std::move(socket), context,
                               {.peer = kSessionListener, .deadline = deadline});
  for (;;) {
    const auto done = handshake.advance();
    if (!done.ok()) return done.error();
    if (*done) return handshake.take().socket;
    MOONCAKE_TRY(await(handshake.socket(), POLLIN, deadline, stop));
  }
}

// Asks over one connection. If it breaks: kInterrupted before the peer has authenticated, kPeerLost
// after that.
Result<SegmentDescription> ask(Fd connected, const TransportContext& context,
                               const Question& question, Deadline deadline,
                               const StopSignal* stop) {
  const auto socket = shakeHands(std::move(connected), context, deadline, stop);
  if (!socket.ok()) {
    if (socket.error().code != ErrorCode::kPeerLost) return socket.error();
    return Error{ErrorCode::kInterrupted,
                 socket.error().message +
                     ": is it an engine of another make? Its wire protocol is not supported"};
  }
  const Bytes asked = ByteWriter().putBytes(question.encode()).take();
  MOONCAKE_TRY(sendAll(socket->get(), asked, deadline, stop));
  uint32_t length = 0;
  MOONCAKE_TRY(
      receiveAll(socket->get(), std::as_writable_bytes(std::span(&length, 1)), deadline, stop));
  if (length > kMostAnswerBytes)
    return Error{ErrorCode::kProtocol, "an answer of " + std::to_string(length) + " bytes"};
  Bytes answer(length);
  MOONCAKE_TRY(receiveAll(socket->get(), answer, deadline, stop));
  return SegmentDescription::decode(answer);
}

}  // namespace

Result<SegmentDescription> askSession(const TransportContext& context, const std::string& session,
                                      const Question& question, Deadline deadline,
                                      const StopSignal* stop) {
  const auto where = SessionId::parse(session);
  if (!where.ok()) return where.error();
  if (where->port == 0)
    return Error{ErrorCode::kInvalidArgument, "\"" + session + "\" names no port"};
  Clock::duration pause = kFirstPause;
  for (int attempt = 1;; ++attempt) {
    auto connected = connectTo(*where, deadline, stop);
    if (!connected.ok()) return at(session, connected.error());
    auto answer = ask(std::move(*connected), context, question, deadline, stop);
    if (answer.ok()) return answer;
    const ErrorCode code = answer.error().code;
    const bool isBroken = code == ErrorCode::kPeerLost || code == ErrorCode::kInterrupted;
    const Error error = at(session, {code == ErrorCode::kInterrupted ? ErrorCode::kRefused : code,
                                     answer.error().message});
    if (!isBroken || attempt == kMostAttempts) return error;
    const Deadline again = Deadline::after(jittered(pause)).earlier(deadline);
    if (await(-1, 0, again, stop).code() != ErrorCode::kTimeout || deadline.passed()) return error;
    pause *= 2;
  }
}

}  // namespace mooncake::transfer
