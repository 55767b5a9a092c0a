#include "transfer/http_client.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <dlfcn.h>
#include <mutex>
#include <string_view>

namespace mooncake::transfer {
namespace {

// Options and codes of curl.h. Their numbers are part of libcurl's ABI.
constexpr int kUrl = 10002, kCustomRequest = 10036, kPostFields = 10015, kPostFieldSize = 60;
constexpr int kWriteData = 10001, kWriteFunction = 20011, kTimeoutMs = 155, kNoSignal = 99;
constexpr int kProtocols = 181, kFollowLocation = 52, kHttpHeader = 10023, kFailOnError = 45;
constexpr int kHeaderFunction = 20079, kHeaderData = 10029;
constexpr int kHttp = 1, kHttps = 2;
constexpr int kResponseCode = 0x200000 + 2;
constexpr int kGlobalAll = 3;
constexpr const char* kLibraries[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};

size_t takeBody(char* bytes, size_t size, size_t count, void* to) {
  auto& body = *static_cast<std::string*>(to);
  if (body.size() + size * count > HttpClient::kMostBytes) return 0;  // ends the request
  body.append(bytes, size * count);
  return size * count;
}

// Returns the value of a header's line; nothing if the line is of another header.
std::optional<std::string_view> valueOf(std::string_view line, std::string_view header) {
  const bool isThis = line.size() > header.size() && line[header.size()] == ':' &&
                      std::equal(header.begin(), header.end(), line.begin(), [](char name, char c) {
                        return name == std::tolower(static_cast<unsigned char>(c));
                      });
  if (!isThis) return std::nullopt;
  line.remove_prefix(header.size() + 1);
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  return line.substr(0, line.find_last_not_of(" \t\r\n") + 1);
}

// Receives one header line of the answer. Keeps the values of ETag and Age.
size_t takeHeader(char* bytes, size_t size, size_t count, void* to) {
  constexpr size_t kMostBytes = 256;
  auto& answer = *static_cast<HttpAnswer*>(to);
  const std::string_view line(bytes, size * count);
  if (line.size() > kMostBytes) return line.size();
  if (const auto tag = valueOf(line, "etag")) answer.tag = *tag;
  if (const auto age = valueOf(line, "age")) {
    uint32_t seconds = 0;
    if (std::from_chars(age->data(), age->data() + age->size(), seconds).ec == std::errc())
      answer.age = std::chrono::seconds(seconds);
  }
  return line.size();
}

}  // namespace

struct HttpClient::Functions {
  void* library = nullptr;
  int (*globalInit)(long) = nullptr;
  void* (*init)() = nullptr;
  int (*set)(void*, int, ...) = nullptr;
  int (*perform)(void*) = nullptr;
  int (*info)(void*, int, ...) = nullptr;
  const char* (*text)(int) = nullptr;
  void (*cleanup)(void*) = nullptr;
  void* (*append)(void*, const char*) = nullptr;
  void (*freeList)(void*) = nullptr;

  template <typename Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    return function != nullptr;
  }
};

Result<std::unique_ptr<HttpClient>> HttpClient::load() {
  auto functions = std::make_shared<Functions>();
  std::string tried;
  for (const char* name : kLibraries) {
    tried += (tried.empty() ? "" : ", ") + std::string(name);
    if (!functions->library) functions->library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  Functions& f = *functions;
  const bool isWhole =
      f.library && f.find(f.globalInit, "curl_global_init") && f.find(f.init, "curl_easy_init") &&
      f.find(f.set, "curl_easy_setopt") && f.find(f.perform, "curl_easy_perform") &&
      f.find(f.info, "curl_easy_getinfo") && f.find(f.text, "curl_easy_strerror") &&
      f.find(f.cleanup, "curl_easy_cleanup") && f.find(f.append, "curl_slist_append") &&
      f.find(f.freeList, "curl_slist_free_all");
  if (!isWhole) {
    return Error{ErrorCode::kUnsupported,
                 "a metadata server is asked by libcurl, which is not here (tried " + tried +
                     "): install it (libcurl4 on Debian), or use P2PHANDSHAKE"};
  }
  static std::once_flag once;  // libcurl requires it
  std::call_once(once, [&f] { f.globalInit(kGlobalAll); });
  std::unique_ptr<HttpClient> client(new HttpClient);
  client->functions_ = std::move(functions);
  return client;
}

Result<HttpAnswer> HttpClient::request(const HttpRequest& asked, Deadline deadline) const {
  const Functions& f = *functions_;
  void* request = f.init();
  if (!request) return Error{ErrorCode::kExhausted, "curl_easy_init failed"};
  void* headers = f.append(nullptr, "Content-Type: application/json");
  headers = f.append(headers, "Expect:");
  if (!asked.ifMatch.empty()) headers = f.append(headers, ("If-Match: " + asked.ifMatch).c_str());
  HttpAnswer answer;
  const long left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
  f.set(request, kUrl, asked.url.c_str());
  f.set(request, kCustomRequest, asked.method.c_str());
  f.set(request, kProtocols, long(kHttp | kHttps));
  f.set(request, kFollowLocation, 0L);
  f.set(request, kFailOnError, 0L);
  f.set(request, kNoSignal, 1L);
  f.set(request, kTimeoutMs, std::clamp(left, 1L, 3'600'000L));
  f.set(request, kHttpHeader, headers);
  f.set(request, kWriteFunction, &takeBody);
  f.set(request, kWriteData, &answer.body);
  f.set(request, kHeaderFunction, &takeHeader);
  f.set(request, kHeaderData, &answer);
  if (asked.method == "PUT") {
    f.set(request, kPostFieldSize, long(asked.body.size()));
    f.set(request, kPostFields, asked.body.data());
  }
  const int failed = f.perform(request);
  if (failed == 0) f.info(request, kResponseCode, &answer.status);
  f.cleanup(request);
  f.freeList(headers);
  if (failed != 0) {
    return Error{
        ErrorCode::kMismatch,
        "metadata server " + asked.url.substr(0, asked.url.find('?')) + ": " + f.text(failed)};
  }
  return answer;
}

std::string percentEncode(const std::string& text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '-' || c == '_' || c == '.' || c == '~') {
      encoded += c;
    } else {
      encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return encoded;
}

}  // namespace mooncake::transfer
