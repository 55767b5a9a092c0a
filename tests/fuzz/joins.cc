// Messages about joining a job, tokens that programs pass on, and reports about the view: a peer that holds the key sends anything.
// Each is refused, or read as it was written.
#include "fuzz.h"
#include "membership/join_messages.h"
#include "membership/join_token.h"
#include "membership/view_report.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  if (const auto message = mooncake::decodeJoinMessage(bytes); message.ok()) {
    const auto again = mooncake::decodeJoinMessage(mooncake::encodeJoinMessage(*message));
    mooncake::fuzz::require(again.ok() && *again == *message);
  }
  if (const auto token = mooncake::decodeJoinToken(bytes); token.ok()) {
    const auto again = mooncake::decodeJoinToken(mooncake::encodeJoinToken(*token));
    mooncake::fuzz::require(again.ok() && *again == *token);
  }
  if (const auto report = mooncake::decodeViewReport(bytes, 64); report.ok()) {
    const auto again = mooncake::decodeViewReport(mooncake::encodeViewReport(*report), 64);
    mooncake::fuzz::require(again.ok() && *again == *report);
  }
  return 0;
}

void mooncake::fuzz::writeSeeds(const Seeds& seed) {
  JoinRequest request{.identity = {.job = "job", .mode = "raise", .options = 1},
                      .rank = 1,
                      .size = 4,
                      .process = 1,
                      .host = "host",
                      .endpoint = Bytes(8)};
  seed("join", encodeJoinMessage(request));
  request.connected = {TermId{1, 2}, 3};
  seed("connected", encodeJoinMessage(request));
  seed("refused", encodeJoinMessage(JoinRefusal{JoinRefusal::Reason::kHeld, "held"}));
  RosterPart part{.epoch = 1, .viewEpoch = 1, .size = 4};
  part.seats = {RosterPart::Seat{{}, true, Bytes(8)}, std::nullopt};
  seed("token", encodeJoinToken({.job = "job", .members = {Bytes(8), Bytes(9)}}));
  seed("roster", encodeJoinMessage(part));
  ViewReport report{.from = 3,
                    .committed = {1},
                    .gone = {1},
                    .settled = {1},
                    .accusations = {{1, Cause::kExited, 2}}};
  seed("report", encodeViewReport(report));
  report.term = {2, 77};
  report.close = Close{.digest = 5, .out = {{2, Cause::kSilent, 0}}, .newcomers = {{2, {}, false}}};
  report.joins = {{.rank = 1}};
  seed("report of a term", encodeViewReport(report));
}
