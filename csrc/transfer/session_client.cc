#include <cerrno>
#include <poll.h>
#include <sys/socket.h>

#include "transfer/session_server.h"
#include "transfer/session_socket.h"

namespace mooncake::transfer {
namespace {

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
    auto done = handshake.advance();
    if (!done.ok()) {
      if (done.error().code != ErrorCode::kPeerLost) return done.error();
      return Error{ErrorCode::kRefused, done.error().message +
                                            ": is it an engine of another make, whose wire is not "
                                            "spoken here?"};
    }
    if (*done) return handshake.take().socket;
    MOONCAKE_TRY(await(handshake.socket(), POLLIN, deadline, stop));
  }
}

Result<SegmentDescription> ask(const TransportContext& context, const SessionId& where,
                               const Question& question, Deadline deadline,
                               const StopSignal* stop) {
  auto connected = connectTo(where, deadline, stop);
  if (!connected.ok()) return connected.error();
  const auto socket = shakeHands(std::move(*connected), context, deadline, stop);
  if (!socket.ok()) return socket.error();
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
  auto answer = ask(context, *where, question, deadline, stop);
  if (!answer.ok()) return at(session, answer.error());
  return answer;
}

}  // namespace mooncake::transfer
