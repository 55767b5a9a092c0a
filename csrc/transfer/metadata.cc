#include "transfer/metadata.h"

#include "transfer/http_metadata.h"
#include "transfer/session_id.h"

namespace mooncake::transfer {
namespace {

class PeerToPeer final : public Metadata {
 public:
  bool namesAreSessions() const override { return true; }
  Result<NameRecord> find(const std::string& name, Deadline) const override {
    const auto session = SessionId::parse(name);
    if (!session.ok()) return session.error();
    return NameRecord{.session = session->text(), .incarnation = {}, .isOurMake = true, .tag = {}};
  }
  Result<bool> put(const std::string&, const NameRecord&, const NameRecord*, Deadline) override {
    return true;
  }
  void erase(const std::string&, const NameRecord&, Deadline) override {}
};

}  // namespace

Result<std::unique_ptr<Metadata>> Metadata::open(const TransferEnv& env,
                                                 const std::string& server) {
  if (server == "P2PHANDSHAKE") return std::unique_ptr<Metadata>(new PeerToPeer);
  if (server.starts_with("http://") || server.starts_with("https://"))
    return HttpMetadata::open(env, server);
  const size_t colon = server.find("://");
  const std::string kind = colon == std::string::npos ? "etcd" : server.substr(0, colon);
  return Error{ErrorCode::kUnsupported, "metadata of kind \"" + kind + "\" (\"" + server +
                                            "\") is not available in this version; there is: "
                                            "P2PHANDSHAKE, http://host:port/metadata"};
}

}  // namespace mooncake::transfer
