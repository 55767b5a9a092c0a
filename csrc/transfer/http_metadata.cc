#include "transfer/http_metadata.h"

#include <charconv>
#include <map>

#include "transfer/session_id.h"

namespace mooncake::transfer {
namespace {

constexpr const char* kEngine = "mooncake-backend";
constexpr size_t kMostFields = 64;

// Reads one flat JSON object of strings and numbers; rejects all other JSON.
class FlatJson {
 public:
  explicit FlatJson(const std::string& text) : text_(text) {}

  Result<std::map<std::string, std::string>> read() {
    std::map<std::string, std::string> fields;
    if (!take('{')) return wrong();
    while (!take('}')) {
      if (!fields.empty() && !take(',')) return wrong();
      std::string name, value;
      if (fields.size() >= kMostFields || !readString(name) || !take(':') || !readValue(value))
        return wrong();
      fields[name] = value;
    }
    skip();
    if (at_ != text_.size()) return wrong();
    return fields;
  }

 private:
  static Error wrong() {
    return {ErrorCode::kProtocol, "the metadata server's record is not a flat JSON object"};
  }
  void skip() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  bool take(char wanted) {
    skip();
    if (at_ >= text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  bool readString(std::string& value) {
    if (!take('"')) return false;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') {
        ++at_;
        // Host names and numbers need no other escapes.
        if (at_ >= text_.size() || (text_[at_] != '"' && text_[at_] != '\\' && text_[at_] != '/'))
          return false;
      }
      value += text_[at_++];
    }
    return take('"');
  }
  bool readValue(std::string& value) {
    skip();
    if (at_ < text_.size() && text_[at_] == '"') return readString(value);
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) ||
                                  text_[at_] == '-' || text_[at_] == '+' || text_[at_] == '.'))
      value += text_[at_++];
    return !value.empty();
  }

  const std::string& text_;
  size_t at_ = 0;
};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) out += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
  return out + "\"";
}

Error noMetadata(const std::string& what) { return {ErrorCode::kMismatch, what}; }

}  // namespace

Result<std::string> fieldOf(const std::string& json, const std::string& name) {
  auto fields = FlatJson(json).read();
  if (!fields.ok()) return fields.error();
  const auto found = fields->find(name);
  if (found == fields->end())
    return Error{ErrorCode::kProtocol, "the metadata server's record has no \"" + name + "\""};
  return found->second;
}

Result<std::unique_ptr<Metadata>> HttpMetadata::open(const TransferEnv& env,
                                                     const std::string& url) {
  auto client = HttpClient::load();
  if (!client.ok()) return client.error();
  const std::string cluster = env.metadataCluster;
  const std::string prefix = cluster.empty() || cluster.ends_with('/') ? cluster : cluster + "/";
  return std::unique_ptr<Metadata>(
      new HttpMetadata(std::move(*client), url, prefix + "mooncake/rpc_meta/"));
}

std::string HttpMetadata::urlOf(const std::string& name) const {
  return url_ + "?key=" + percentEncode(prefix_ + name);
}

Result<NameRecord> HttpMetadata::find(const std::string& name, Deadline deadline) const {
  const auto answer = client_->request({.method = "GET", .url = urlOf(name)}, deadline);
  if (!answer.ok()) return answer.error();
  if (answer->status == 404)
    return noMetadata("the metadata server knows no segment \"" + name + "\"");
  if (answer->status != 200)
    return noMetadata("the metadata server answers " + std::to_string(answer->status));
  const std::string& json = answer->body;
  const auto host = fieldOf(json, "ip_or_host_name");
  if (!host.ok()) return host.error();
  const auto port = fieldOf(json, "rpc_port");
  if (!port.ok()) return port.error();
  auto session = SessionId::parse(*host);
  if (!session.ok()) return session.error();
  const auto [end, error] =
      std::from_chars(port->data(), port->data() + port->size(), session->port);
  if (error != std::errc() || end != port->data() + port->size() || session->port == 0)
    return Error{ErrorCode::kProtocol,
                 "the metadata server's record of \"" + name + "\" has no valid port"};
  const auto engine = fieldOf(json, "engine");
  const auto incarnation = fieldOf(json, "incarnation");
  return NameRecord{.session = session->text(),
                    .incarnation = incarnation.ok() ? *incarnation : std::string(),
                    .isOurMake = engine.ok() && *engine == kEngine,
                    .tag = answer->tag,
                    .age = answer->age};
}

Result<bool> HttpMetadata::put(const std::string& name, const NameRecord& record,
                               const NameRecord* seen, Deadline deadline) {
  const auto own = SessionId::parse(record.session);
  if (!own.ok()) return own.error();
  if (seen && seen->tag.empty())
    (void)client_->request({.method = "DELETE", .url = urlOf(name)}, deadline);
  const auto answer = client_->request(
      {.method = "PUT",
       .url = urlOf(name),
       .body = "{\"ip_or_host_name\": " + quoted(own->host) +
               ", \"rpc_port\": " + std::to_string(own->port) + ", \"engine\": " + quoted(kEngine) +
               ", \"incarnation\": " + quoted(record.incarnation) + "}",
       .ifMatch = seen ? seen->tag : std::string()},
      deadline);
  if (!answer.ok()) return answer.error();
  if (answer->status == 200) return true;
  if (answer->status == 400 || answer->status == 412) return false;
  return noMetadata("the metadata server refused \"" + name + "\" with " +
                    std::to_string(answer->status) + ": " + answer->body.substr(0, 200));
}

void HttpMetadata::erase(const std::string& name, const NameRecord& record, Deadline deadline) {
  const auto there = find(name, deadline);
  const bool isThis =
      there.ok() && there->session == record.session && there->incarnation == record.incarnation;
  if (!isThis) return;
  (void)client_->request({.method = "DELETE", .url = urlOf(name), .ifMatch = there->tag}, deadline);
}

}  // namespace mooncake::transfer
