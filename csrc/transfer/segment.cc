#include "transfer/segment.h"

#include "engine/route.h"
#include "transfer/name_keeper.h"
#include "transfer/session_server.h"

namespace mooncake::transfer {

Result<Segment::Place> Segment::locate(uint64_t address, uint64_t bytes, uint32_t right,
                                       Deadline deadline) {
  if (isOurs_) return locateHere(address, bytes, right);
  const auto known = this->known(deadline);
  if (!known.ok()) return known.error();
  const Known& all = **known;
  if (!all.peer) return locateHere(address, bytes, right);
  const auto behind = all.byAddress.upper_bound(address);
  if (behind != all.byAddress.begin()) {
    const RemoteBuffer& buffer = *std::prev(behind)->second;
    const uint64_t offset = address - buffer.region.address;
    if (offset <= buffer.region.bytes && bytes <= buffer.region.bytes - offset &&
        (buffer.rights & right) == right)
      return Place{all.peer, buffer.region, offset, all.generation};
  }
  return Error{ErrorCode::kRefused,
               "the range is not in memory that \"" + name_ + "\" has registered"};
}

Result<Segment::Place> Segment::locateHere(uint64_t address, uint64_t bytes, uint32_t right) const {
  const auto buffer = context_.memory.find(address, bytes);
  if (!buffer || (buffer->rights & right) != right)
    return Error{ErrorCode::kRefused, "the range is not in memory that is registered here"};
  const RemoteRegion region = buffer->region.remote();
  return Place{nullptr, region, address - region.address, 0};
}

uint64_t Segment::generation() const {
  Lock lock(mutex_);
  return known_ ? known_->generation : 0;
}

Result<Segment::KnownPtr> Segment::known(Deadline deadline) {
  {
    Lock lock(mutex_);
    if (known_) return known_;
  }
  MOONCAKE_TRY(refresh(0, deadline));
  Lock lock(mutex_);
  return known_;
}

Status Segment::refresh(uint64_t generation, Deadline deadline) {
  if (isOurs_) return {};
  {
    Lock lock(mutex_);
    if (!asked_.wait_until(mutex_, deadline.when(),
                           [this]() REQUIRES(mutex_) { return !isAsking_; }))
      return {ErrorCode::kTimeout, "\"" + name_ + "\" has not answered in time"};
    if ((known_ ? known_->generation : 0) != generation) return {};
    isAsking_ = true;
  }
  auto known = ask(deadline);
  Lock lock(mutex_);
  isAsking_ = false;
  asked_.notify_all();
  if (!known.ok()) return known.error();
  known_ = std::move(*known);
  return {};
}

std::shared_ptr<Segment::Asking> Segment::refreshSoon(uint64_t generation, Deadline deadline,
                                                      Errands& errands, Doorbell& bell) {
  Lock lock(mutex_);
  if (soon_ && soon_->generation_ == generation) {
    soon_->bells_.push_back(&bell);
    return soon_;
  }
  soon_ = std::make_shared<Asking>(generation);
  soon_->bells_.push_back(&bell);
  const auto asking = soon_;
  const Status posted = errands.post([self = shared_from_this(), asking, generation, deadline] {
    Status answer = self->refresh(generation, deadline);
    Lock done(self->mutex_);
    if (self->soon_ == asking) self->soon_ = nullptr;
    asking->answer_ = std::move(answer);
    asking->isDone_.exchange(true, std::memory_order_seq_cst);
    for (Doorbell* waiting : asking->bells_) waiting->ring();
  });
  if (!posted.ok()) {
    soon_ = nullptr;
    asking->answer_ = posted;
    asking->isDone_.exchange(true, std::memory_order_seq_cst);
  }
  return asking;
}

std::optional<NamedAnswer> Segment::askStandingPeer(const Question& question,
                                                    Deadline deadline) const {
  if (isOurs_ || context_.metadata.namesAreSessions()) return std::nullopt;
  KnownPtr known;
  {
    Lock lock(mutex_);
    known = known_;
  }
  if (!known || !known->peer || known->peer->disconnected) return std::nullopt;
  // The other half of the time is for the metadata server.
  deadline = deadline.earlier(Deadline::after(deadline.left() / 2));
  auto answer = askSession(context_.session, known->session, question, deadline, &context_.closing);
  // The answer has another name if the engine has withdrawn its own, or if another engine has the
  // port now.
  if (!answer.ok() || answer->name != name_) return std::nullopt;
  const auto id = endpointOwner(answer->endpoint);
  if (!id.ok() || *id != known->peer->id) return std::nullopt;
  return NamedAnswer{known->session, std::move(*answer)};
}

Result<NamedAnswer> askByName(const SegmentContext& context, const std::string& name,
                              const Question& question, Deadline deadline) {
  const auto record = context.metadata.find(name, deadline);
  if (!record.ok()) return record.error();
  if (!record->isOurMake) {
    return Error{
        ErrorCode::kRefused,
        "\"" + name + "\" is an engine of another make: its wire protocol is not supported"};
  }
  auto answer = askSession(context.session, record->session, question, deadline, &context.closing);
  if (!answer.ok()) return answer.error();
  if (!context.metadata.namesAreSessions()) MOONCAKE_TRY(checkIdentity(name, *record, *answer));
  return NamedAnswer{record->session, std::move(*answer)};
}

Result<Segment::KnownPtr> Segment::ask(Deadline deadline) {
  deadline = deadline.earlier(Deadline::after(context_.patience));
  auto found = askStandingPeer({}, deadline);
  if (!found) {
    auto asked = askByName(context_, name_, {}, deadline);
    if (!asked.ok()) return asked.error();
    found = std::move(*asked);
  }
  auto& [session, description] = *found;
  // open() returns the peer that we have if it is still connected.
  auto peer = context_.engine.open(description.endpoint, name_, deadline, &context_.closing);
  if (!peer.ok()) return peer.error();
  auto known = std::make_shared<Known>();
  known->peer = std::move(*peer);
  {
    Lock lock(mutex_);
    known->generation = (known_ ? known_->generation : 0) + 1;
  }
  if (known->peer && known->peer->disconnected)
    return Error{ErrorCode::kPeerLost, "\"" + name_ + "\": " + known->peer->evidence.detail};
  known->session = std::move(session);
  known->inOrder = std::move(description.buffers);
  for (const RemoteBuffer& buffer : known->inOrder)
    known->byAddress.emplace(buffer.region.address, &buffer);
  return KnownPtr(std::move(known));
}

Result<std::shared_ptr<Peer>> Segment::peer(Deadline deadline) {
  if (isOurs_) return std::shared_ptr<Peer>();
  const auto known = this->known(deadline);
  if (!known.ok()) return known.error();
  return (*known)->peer;
}

Result<uint64_t> Segment::firstBuffer(Deadline deadline) {
  if (isOurs_) {
    const auto buffers = context_.memory.list();
    return buffers.empty() ? 0 : buffers.front().region.address;
  }
  // The peer may have registered memory since it was asked.
  MOONCAKE_TRY(refresh(generation(), deadline));
  const auto known = this->known(deadline);
  if (!known.ok()) return known.error();
  const auto& buffers = (*known)->inOrder;
  return buffers.empty() ? 0 : buffers.front().region.address;
}

Result<std::vector<RemoteRegion>> Segment::regions(Deadline deadline) {
  const auto known = this->known(deadline);
  if (!known.ok()) return known.error();
  std::vector<RemoteRegion> regions;
  for (const RemoteBuffer& buffer : (*known)->inOrder) regions.push_back(buffer.region);
  return regions;
}

}  // namespace mooncake::transfer
