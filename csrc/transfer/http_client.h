#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/result.h"

namespace mooncake::transfer {

struct HttpRequest {
  std::string method;  // "GET", "DELETE", or "PUT", which has a body
  std::string url;
  std::string body;
  std::string ifMatch;  // value of the header If-Match; empty: the request has none
};

struct HttpAnswer {
  long status = 0;
  std::string body;
  std::string tag;                          // value of the header ETag; empty: the answer has none
  std::optional<std::chrono::seconds> age;  // value of the header Age, if the answer has it
};

// HTTP requests through the system's libcurl, which is loaded at run time. Any thread. Each request
// opens its own connection, blocks until the deadline at most, and reads at most kMostBytes.
class HttpClient {
 public:
  static constexpr size_t kMostBytes = size_t(16) << 20;

  // kUnsupported: names the libraries that were tried and the package to install.
  static Result<std::unique_ptr<HttpClient>> load();

  // Fails only if the server gives no answer; an HTTP error status is an answer.
  Result<HttpAnswer> request(const HttpRequest& asked, Deadline deadline) const;

 private:
  struct Functions;
  HttpClient() = default;
  std::shared_ptr<const Functions> functions_;
};

// Encodes text for a URL's query: unreserved characters stay, all other characters become %XX.
std::string percentEncode(const std::string& text);

}  // namespace mooncake::transfer
