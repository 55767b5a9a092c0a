#include "transfer/directory.h"

namespace mooncake::transfer {

Directory::Directory(const SegmentContext& context, std::string name)
    : context_(context), name_(std::move(name)) {
  const auto ours = std::make_shared<Segment>(context_, name_, kOurs, /*isOurs=*/true);
  byName_[name_] = byId_[kOurs] = ours;
}

Result<std::shared_ptr<Segment>> Directory::open(const std::string& name, Deadline deadline) {
  std::shared_ptr<Segment> segment;
  {
    Lock lock(mutex_);
    if (const auto found = byName_.find(name); found != byName_.end()) segment = found->second;
  }
  if (!segment) {
    if (name.empty() || name.size() > kMostNameBytes)
      return Error{ErrorCode::kInvalidArgument,
                   "a segment's name has 1 to " + std::to_string(kMostNameBytes) + " bytes"};
    segment = std::make_shared<Segment>(context_, name, 0, /*isOurs=*/false);
    if (const auto peer = segment->peer(deadline); !peer.ok()) return peer.error();
    Lock lock(mutex_);
    auto& known = byName_[name];
    if (!known) {
      segment->setId(++lastId_);
      byId_[segment->id()] = known = segment;
    }
    segment = known;
  }
  return segment;
}

Status Directory::probe(const std::string& name, Deadline deadline) const {
  constexpr Question kProbe{.kind = Question::Kind::kProbe};
  std::shared_ptr<Segment> known;
  {
    Lock lock(mutex_);
    if (const auto found = byName_.find(name); found != byName_.end()) known = found->second;
  }
  if (known && known->askStandingPeer(kProbe, deadline)) return {};
  return askByName(context_, name, kProbe, deadline).status();
}

std::shared_ptr<Segment> Directory::find(int32_t id) const {
  Lock lock(mutex_);
  const auto found = byId_.find(id);
  return found == byId_.end() ? nullptr : found->second;
}

Code Directory::close(int32_t id) {
  Lock lock(mutex_);
  const auto found = byId_.find(id);
  if (found == byId_.end()) return kInvalid;
  if (id == kOurs) return kGood;
  byName_.erase(found->second->name());
  byId_.erase(found);
  return kGood;
}

std::vector<std::shared_ptr<Segment>> Directory::all() const {
  Lock lock(mutex_);
  std::vector<std::shared_ptr<Segment>> all;
  for (const auto& [id, segment] : byId_) all.push_back(segment);
  return all;
}

Status Directory::refresh(Deadline deadline) {
  Status first;
  for (const auto& segment : all()) {
    const Status asked = segment->refresh(segment->generation(), deadline);
    if (!asked.ok() && first.ok()) first = asked;
  }
  return first;
}

}  // namespace mooncake::transfer
