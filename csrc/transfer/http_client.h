#pragma once

#include <memory>
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
  std::string tag;  // value of the header ETag; empty: the answer has none
};

// Requests by the system's libcurl, which is opened at run time. Any thread; each request is a
// connection of its own, blocks until the deadline at most, and reads no more than a bound.
class HttpClient {
 public:
  static constexpr size_t kMostBytes = size_t(16) << 20;

  // kUnsupported names the libraries that were tried and the package to install.
  static Result<std::unique_ptr<HttpClient>> load();

  // An error only where there is no answer.
  Result<HttpAnswer> request(const HttpRequest& asked, Deadline deadline) const;

 private:
  struct Functions;
  HttpClient() = default;
  std::shared_ptr<const Functions> functions_;
};

// What may stand in a query as it is stays, all else is %XX.
std::string percentEncode(const std::string& text);

}  // namespace mooncake::transfer
