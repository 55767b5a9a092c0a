#pragma once

#include "transfer/http_client.h"
#include "transfer/metadata.h"

namespace mooncake::transfer {

// Names in a metadata server that speaks HTTP: GET, PUT and DELETE of URL?key=KEY. Our records are
//   KEY  [cluster]mooncake/rpc_meta/NAME
//   {"ip_or_host_name": "10.0.0.1", "rpc_port": 15123, "engine": "mooncake-backend",
//    "incarnation": "0123456789abcdef0123456789abcdef"}
// Registered memory is not in the record: a peer asks the engine itself. Our server sends an ETag
// and honors If-Match. Mooncake's does neither, so a record that another engine writes between two
// of our requests can be lost there.
class HttpMetadata final : public Metadata {
 public:
  static Result<std::unique_ptr<Metadata>> open(const TransferEnv& env, const std::string& url);

  bool namesAreSessions() const override { return false; }
  Result<NameRecord> find(const std::string& name, Deadline deadline) const override;
  Result<bool> put(const std::string& name, const NameRecord& record, const NameRecord* seen,
                   Deadline deadline) override;
  void erase(const std::string& name, const NameRecord& record, Deadline deadline) override;

 private:
  HttpMetadata(std::unique_ptr<HttpClient> client, std::string url, std::string prefix)
      : client_(std::move(client)), url_(std::move(url)), prefix_(std::move(prefix)) {}
  std::string urlOf(const std::string& name) const;

  const std::unique_ptr<HttpClient> client_;
  const std::string url_;
  const std::string prefix_;
};

// Returns a field of a flat JSON object, a string or a number, as text. kProtocol: not such an
// object, or it has no field of this name.
Result<std::string> fieldOf(const std::string& json, const std::string& name);

}  // namespace mooncake::transfer
