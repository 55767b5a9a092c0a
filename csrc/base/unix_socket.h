#pragma once

#include <string>
#include <sys/types.h>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/fd.h"
#include "base/result.h"

// Stream sockets in the abstract namespace: no file, gone with the process, reachable from the same
// network namespace only. The name is not secret (/proc/net/unix shows it), so a peer that connects
// must prove that it knows the job's key.
namespace mooncake {

Result<Fd> listenAbstract(const std::string& name);  // non-blocking

// kUnsupported: no socket listens under this name here. The peer is on another host, in another
// network namespace, or gone.
Result<Fd> connectAbstract(const std::string& name, Deadline deadline);

// Returns the process at the other end, as a number of our pid namespace; 0: not visible there.
pid_t peerProcess(int socket);

// Sends the whole message, with one descriptor attached to its first byte. The socket's buffer must
// have room.
Status sendWithFd(int socket, ByteView message, int fd);

// Appends the bytes that have arrived, at most `atMost`, and keeps an attached descriptor. Returns
// the number of bytes; 0: nothing has arrived. kPeerLost: the stream has ended.
Result<size_t> receiveWithFd(int socket, size_t atMost, Bytes& message, Fd& fd);

}  // namespace mooncake
