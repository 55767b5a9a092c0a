#pragma once

#include <arpa/inet.h>
#include <cstdint>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "base/fd.h"

namespace mooncake::test {

// Accepts connections at a port of 127.0.0.1 and never sends anything.
class SilentListener {
 public:
  SilentListener() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    socklen_t bytes = sizeof address;
    EXPECT_EQ(::bind(socket_.get(), generic, bytes), 0);
    EXPECT_EQ(::listen(socket_.get(), 16), 0);
    EXPECT_EQ(::getsockname(socket_.get(), generic, &bytes), 0);
    port_ = ntohs(address.sin_port);
  }
  uint16_t port() const { return port_; }
  // True once a peer has connected.
  bool isCalled() const {
    pollfd one{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    return ::poll(&one, 1, 0) > 0;
  }

 private:
  Fd socket_;
  uint16_t port_ = 0;
};

}  // namespace mooncake::test
