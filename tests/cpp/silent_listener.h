#pragma once

#include <arpa/inet.h>
#include <cstdint>
#include <netinet/in.h>
#include <sys/socket.h>

#include "base/fd.h"

namespace mooncake::test {

// Takes connections at a port of 127.0.0.1 and never says a word.
class SilentListener {
 public:
  explicit SilentListener(uint16_t port = 0) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const int on = 1;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listens_ = ::bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
               ::listen(socket_.get(), 16) == 0;
  }
  bool listens() const { return listens_; }

 private:
  Fd socket_;
  bool listens_ = false;
};

}  // namespace mooncake::test
