#pragma once

#include <string>
#include <sys/types.h>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/fd.h"
#include "base/result.h"

// Stream sockets in the abstract namespace: no file, gone with the process, reachable from the same
// network namespace only. The name is no secret (/proc/net/unix shows it): whoever connects must
// know the job's key.
namespace mooncake {

Result<Fd> listenAbstract(const std::string& name);  // non-blocking

// kUnsupported when nobody listens under this name here: another host, another network namespace,
// or gone.
Result<Fd> connectAbstract(const std::string& name, Deadline deadline);

// The process at the other end, as a number of our pid namespace; 0 when it is not visible from
// there.
pid_t peerProcess(int socket);

// The whole message with one descriptor riding on its first byte. The socket's buffer must have
// room.
Status sendWithFd(int socket, ByteView message, int fd);

// Appends what is there, at most `atMost` bytes, and keeps a descriptor that came along. The number
// of bytes is 0 when nothing is there now; kPeerLost at the end of the stream.
Result<size_t> receiveWithFd(int socket, size_t atMost, Bytes& message, Fd& fd);

}  // namespace mooncake
