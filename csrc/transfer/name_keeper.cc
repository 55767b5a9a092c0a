#include "transfer/name_keeper.h"

#include <utility>

#include "base/backoff.h"
#include "base/log.h"
#include "base/thread.h"
#include "engine/route.h"
#include "transfer/session_server.h"
#include "transfer/session_socket.h"

namespace mooncake::transfer {
namespace {

// A record may change between two requests, and each change comes from another engine. More than a
// few changes in one attempt mean that engines compete for the name.
constexpr int kMostTries = 3;
// A live engine writes its record again every 15 s (NameKeeper::Options::period).
constexpr auto kLease = std::chrono::seconds(30);

}  // namespace

NameKeeper::NameKeeper(Metadata& metadata, Ask ask, Options options)
    : metadata_(metadata), ask_(std::move(ask)), options_(std::move(options)) {}

NameKeeper::~NameKeeper() { retract(); }

Status NameKeeper::publish() {
  if (metadata_.namesAreSessions()) return {};
  MOONCAKE_TRY(attempt(Deadline::after(options_.patience)));
  const Lock ending(endingMutex_);
  isPublished_ = true;  // set first: retract() must delete the record even if no thread starts
  auto thread = startThread("mooncake-name", [this] { run(); });
  if (!thread.ok()) return thread.error();
  thread_ = std::move(*thread);
  return {};
}

void NameKeeper::renewSoon() {
  const Lock lock(mutex_);
  if (!std::exchange(isWanted_, true)) changed_.notify_one();
}

void NameKeeper::retract() {
  const Lock ending(endingMutex_);
  {
    const Lock lock(mutex_);
    if (std::exchange(isRetracted_, true)) return;
    changed_.notify_one();
  }
  // The keeper's last attempt ends first. Otherwise it could write the record after our deletion.
  // Both have one deadline: a server that held up the attempt answers the deletion no sooner.
  const auto deadline = Deadline::after(options_.patience);
  if (thread_.joinable()) thread_.join();
  if (isPublished_) metadata_.erase(options_.name, options_.record, deadline);
}

bool NameKeeper::isRetracted() const {
  const Lock lock(mutex_);
  return isRetracted_;
}

void NameKeeper::run() {
  Lock lock(mutex_);
  Clock::time_point earliest = Clock::now();
  Clock::time_point due = earliest + jittered(options_.period);
  while (!isRetracted_) {
    const auto next = isWanted_ ? std::min(earliest, due) : due;
    if (Clock::now() < next) {
      changed_.wait_until(mutex_, next);
      continue;
    }
    isWanted_ = false;
    lock.unlock();
    report(attempt(Deadline::after(options_.patience)));
    lock.lock();
    earliest = Clock::now() + options_.leastPause;
    due = Clock::now() + jittered(options_.period);
  }
}

void NameKeeper::report(const Status& attempted) {
  if (attempted.ok() == std::exchange(wasKept_, attempted.ok())) return;
  if (attempted.ok()) {
    log(LogLevel::kInfo, options_.logName, "the name is in the metadata server again");
  } else {
    log(LogLevel::kWarning, options_.logName,
        "the name is not published again, which is tried until it succeeds: ",
        attempted.error().message);
  }
}

Status NameKeeper::attempt(Deadline deadline) {
  const NameRecord* seen = nullptr;
  Result<NameRecord> found(ErrorCode::kMismatch, "");
  for (int i = 0; i < kMostTries; ++i) {
    const auto put = metadata_.put(options_.name, options_.record, seen, deadline);
    if (!put.ok()) return put.status();
    if (*put) return {};
    seen = nullptr;
    found = metadata_.find(options_.name, deadline);
    if (!found.ok()) {
      if (found.error().code == ErrorCode::kMismatch) continue;  // deleted meanwhile
      return {ErrorCode::kInvalidArgument, "the name \"" + options_.name +
                                               "\" is taken: " + found.error().message +
                                               ". Delete its key there if no engine has it"};
    }
    // An older Mooncake server refuses a record that it already has.
    if (found->session == options_.record.session &&
        found->incarnation == options_.record.incarnation)
      return {};
    MOONCAKE_TRY(checkHolder(*found, deadline));
    log(LogLevel::kInfo, options_.logName, "takes the name \"", options_.name,
        "\" over from an engine at ", found->session, " that has ended");
    seen = &*found;
  }
  return {ErrorCode::kInvalidArgument,
          "the name \"" + options_.name + "\" is taken: other engines publish it at this moment"};
}

// Returns ok if no engine answers for the record.
Status NameKeeper::checkHolder(const NameRecord& record, Deadline deadline) const {
  const auto answer = ask_(record.session, deadline);
  const std::string taken = "the name \"" + options_.name + "\" is taken: ";
  if (answer.ok()) {
    if (!checkIdentity(options_.name, record, *answer).ok()) return {};
    return {ErrorCode::kInvalidArgument, taken + "an engine at " + record.session + " has it"};
  }
  if (answer.error().code == ErrorCode::kPeerLost) return {};
  // An answer that is no handshake cannot come from an engine of ours.
  if (answer.error().code == ErrorCode::kProtocol && record.isOurMake) return {};
  if (answer.error().code == ErrorCode::kAborted) return answer.status();
  if (answer.error().code == ErrorCode::kSystem) {
    const bool isRenewed = record.isOurMake && !record.incarnation.empty() && record.age;
    if (isRenewed && *record.age > kLease) return {};
    return {ErrorCode::kInvalidArgument,
            taken + "the engine that has it cannot be reached from here (" +
                answer.error().message + "). If it has ended, " +
                (isRenewed ? "the name is free " +
                                 std::to_string((kLease - *record.age).count() + 1) + " s from now"
                           : "delete the name's key from the server")};
  }
  return {ErrorCode::kInvalidArgument,
          taken + "a program listens at " + record.session +
              " and may be the engine that has it (" + answer.error().message +
              "). If it is not, delete the name's key from the server"};
}

Result<SegmentDescription> askHolder(const TransportContext& context, const std::string& session,
                                     Deadline deadline, const StopSignal& stop) {
  const auto where = SessionId::parse(session);
  if (!where.ok()) return where.error();
  // A host that is switched off does not answer, so connecting may use only half of the time: the
  // rest is for the other requests.
  const auto patience = deadline.earlier(Deadline::after(deadline.left() / 2));
  const auto connected = connectTo(*where, patience, &stop);
  if (!connected.ok()) {
    const ErrorCode code = connected.error().code;
    const bool isUnreachable = code == ErrorCode::kTimeout || code == ErrorCode::kSystem;
    return Error{isUnreachable ? ErrorCode::kSystem : code, connected.error().message};
  }
  auto answer = askSession(context, session, {.kind = Question::Kind::kProbe}, deadline, &stop);
  // The engine listened a moment ago, so a broken connection does not mean that it has ended.
  if (!answer.ok() && answer.error().code == ErrorCode::kPeerLost)
    return Error{ErrorCode::kRefused, answer.error().message};
  return answer;
}

Result<std::string> incarnationOf(ByteView endpoint) {
  const auto id = endpointOwner(endpoint);
  if (!id.ok()) return id.error();
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : *id)
    text += {kDigits[std::to_integer<int>(byte) >> 4], kDigits[std::to_integer<int>(byte) & 15]};
  return text;
}

Status checkIdentity(const std::string& name, const NameRecord& record,
                     const SegmentDescription& answer) {
  const auto incarnation = incarnationOf(answer.endpoint);
  if (!incarnation.ok()) return incarnation.status();
  const bool isSame =
      record.incarnation.empty() ? answer.name == name : *incarnation == record.incarnation;
  if (isSame) return {};
  return {ErrorCode::kPeerLost, "the engine that published \"" + name + "\" has ended: at " +
                                    record.session + " \"" + answer.name + "\" answers now"};
}

}  // namespace mooncake::transfer
