#pragma once

#include "transfer/http_client.h"
#include "transfer/metadata.h"

namespace mooncake::transfer {

// Names in a metadata server that speaks HTTP: GET, PUT and DELETE of URL?key=KEY. Ours have
//   KEY  [cluster]mooncake/rpc_meta/NAME
//   {"ip_or_host_name": "10.0.0.1", "rpc_port": 15123, "engine": "mooncake-backend"}
// What is registered is not there: whoever wants to know asks the engine itself.
class HttpMetadata final : public Metadata {
 public:
  static Result<std::unique_ptr<Metadata>> open(const TransferEnv& env, const std::string& url);

  bool namesAreSessions() const override { return false; }
  Result<std::string> sessionOf(const std::string& name, Deadline deadline) const override;
  // Takes the name over from an engine that is not there any more.
  Status publish(const std::string& name, const std::string& session, Deadline deadline) override;
  void retract(const std::string& name, Deadline deadline) override;

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
