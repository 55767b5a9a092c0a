#pragma once

#include "transfer/http_client.h"
#include "transfer/metadata.h"

namespace mooncake::transfer {

// Names in a metadata server that speaks HTTP: GET, PUT and DELETE of URL?key=KEY. Our records are
//   KEY  [cluster]mooncake/rpc_meta/NAME
//   {"ip_or_host_name": "10.0.0.1", "rpc_port": 15123, "engine": "mooncake-backend",
//    "incarnation": "0123456789abcdef0123456789abcdef"}
// Registered memory is not there: a peer asks the engine itself. Our server answers with an ETag,
// and heeds If-Match. Mooncake's does neither: there a record that another engine writes between
// two requests of ours can be lost.
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

// Of a flat JSON object: the text of a string or number. kProtocol: there is none of this name.
Result<std::string> fieldOf(const std::string& json, const std::string& name);

}  // namespace mooncake::transfer
