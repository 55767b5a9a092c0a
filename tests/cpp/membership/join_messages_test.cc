#include "membership/join_messages.h"

#include <gtest/gtest.h>
#include <random>

#include "membership/join_desk.h"

namespace mooncake {
namespace {

using Reason = JoinRefusal::Reason;

EngineId idOf(int n) {
  EngineId id{};
  id[0] = std::byte(n);
  return id;
}

JoinRequest someRequest() {
  return {.identity = {.job = "a job", .mode = "raise", .options = 99},
          .rank = 3,
          .size = 5,
          .process = 4711,
          .host = "here",
          .endpoint = Bytes(40, std::byte(3))};
}

std::vector<JoinMessage> someMessages() {
  JoinRequest connected = someRequest();
  connected.connected = {TermId{3, 4}, 12};
  RosterPart part{.number = 2, .epoch = 7, .viewEpoch = 8, .size = 5, .first = 1};
  part.seats = {RosterPart::Seat{{idOf(1), 2}, true, Bytes(10)}, std::nullopt,
                RosterPart::Seat{{idOf(2), 0}, false, {}}};
  return {someRequest(), connected, JoinRefusal{Reason::kHeld, "a living process holds it"},
          JoinMeeting{2, Bytes(30, std::byte(1))}, part};
}

TEST(JoinMessage, WhatIsWrittenIsRead) {
  for (const JoinMessage& message : someMessages()) {
    const auto read = decodeJoinMessage(encodeJoinMessage(message));
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(*read, message);
  }
}

TEST(JoinMessage, AnyBytesAreRefusedOrMakeSense) {
  std::mt19937 random(20261128);
  for (const JoinMessage& message : someMessages()) {
    const Bytes whole = encodeJoinMessage(message);
    for (int i = 0; i < 20000; ++i) {
      Bytes bytes(whole.begin(), whole.begin() + random() % (whole.size() + 1));
      for (int flips = random() % 4; flips > 0 && !bytes.empty(); --flips)
        bytes[random() % bytes.size()] = std::byte(random());
      const auto read = decodeJoinMessage(bytes);
      if (read.ok()) {
        EXPECT_EQ(*decodeJoinMessage(encodeJoinMessage(*read)), *read);
      }
    }
  }
}

TEST(JoinMessage, NonsenseIsRefused) {
  const auto code = [](const JoinMessage& message) {
    return decodeJoinMessage(encodeJoinMessage(message)).status().code();
  };
  JoinRequest request = someRequest();
  request.size = 0;
  EXPECT_EQ(code(request), ErrorCode::kProtocol);
  request = someRequest();
  request.endpoint = Bytes(JoinRequest::kMostEndpoint + 1);
  EXPECT_EQ(code(request), ErrorCode::kProtocol);
  EXPECT_EQ(code(JoinRefusal{Reason(0), ""}), ErrorCode::kProtocol);
  EXPECT_EQ(code(JoinRefusal{Reason(13), ""}), ErrorCode::kProtocol);
  RosterPart part = std::get<RosterPart>(someMessages().back());
  part.first = 3;
  EXPECT_EQ(code(part), ErrorCode::kProtocol) << "ranks that the job does not have";
  part = std::get<RosterPart>(someMessages().back());
  part.seats.clear();
  EXPECT_EQ(code(part), ErrorCode::kProtocol);
  part = std::get<RosterPart>(someMessages().back());
  part.viewEpoch = 6;
  EXPECT_EQ(code(part), ErrorCode::kProtocol) << "a view before its term";
  Bytes bytes = encodeJoinMessage(someRequest());
  bytes.push_back(std::byte(0));
  EXPECT_EQ(decodeJoinMessage(bytes).status().code(), ErrorCode::kProtocol);
  bytes = encodeJoinMessage(someRequest());
  bytes[0] = std::byte(9);
  EXPECT_EQ(decodeJoinMessage(bytes).status().code(), ErrorCode::kMismatch);
}

TEST(JoinMessage, ALargeRosterGoesInParts) {
  Term term{.number = 3, .epoch = 9};
  View view{11, {}};
  std::vector<Bytes> endpoints;
  for (int rank = 0; rank < 1024; ++rank) {
    endpoints.push_back(Bytes(200, std::byte(rank)));
    term.holders.emplace_back();
    if (rank % 3 != 0) term.holders.back() = Holder{idOf(rank % 250), uint32_t(rank % 4)};
    if (rank % 3 == 1) view.active.add(rank);
  }
  const auto parts = splitRoster(term, view, endpoints);
  EXPECT_GT(parts.size(), 1u);
  Term read{.number = 3, .epoch = 9};
  int rank = 0;
  for (const RosterPart& part : parts) {
    const Bytes bytes = encodeJoinMessage(part);
    EXPECT_LT(bytes.size(), size_t(60) << 10);
    EXPECT_EQ(*decodeJoinMessage(bytes), JoinMessage(part));
    EXPECT_EQ(part.first, rank);
    for (const auto& seat : part.seats) {
      read.holders.push_back(seat ? std::optional(seat->holder) : std::nullopt);
      EXPECT_EQ(seat && seat->isActive, view.active.contains(rank));
      EXPECT_EQ(seat ? seat->endpoint : Bytes(),
                view.active.contains(rank) ? endpoints[size_t(rank)] : Bytes());
      ++rank;
    }
  }
  EXPECT_EQ(read, term);
}

// ---- what a member answers

class Desk : public ::testing::Test {
 protected:
  JoinDesk desk{{.identity = JobIdentity{"a job", "raise", 99},
                 .size = 5,
                 .patience = std::chrono::seconds(1)}};
  JoinDesk::Now now{.view = {4, {0, 1, 2}}, .time = Clock::time_point(std::chrono::hours(1))};

  std::optional<Reason> ask(const JoinRequest& request, int from = 1) {
    const auto refusal = desk.take(idOf(from), request, now);
    if (!refusal) return std::nullopt;
    EXPECT_FALSE(refusal->text.empty());
    return refusal->reason;
  }
};

TEST_F(Desk, RefusesByName) {
  const auto with = [&](auto change) {
    JoinRequest request = someRequest();
    change(request);
    return ask(request);
  };
  EXPECT_EQ(with([](auto&) {}), std::nullopt);
  EXPECT_EQ(with([](auto& r) { r.identity.job = "b"; }), Reason::kJob);
  EXPECT_EQ(with([](auto& r) { r.identity.mode = "continue"; }), Reason::kMode);
  EXPECT_EQ(with([](auto& r) { r.identity.options = 1; }), Reason::kOptions);
  EXPECT_EQ(with([](auto& r) { r.size = 6; }), Reason::kSize);
  EXPECT_EQ(with([](auto& r) { r.rank = 5; }), Reason::kRange);
  EXPECT_EQ(with([](auto& r) { r.rank = 2; }), Reason::kHeld);
  now.isFormer = true;
  EXPECT_EQ(with([](auto&) {}), Reason::kOlder);
  now.isOver = true;
  EXPECT_EQ(with([](auto&) {}), Reason::kOver);
  EXPECT_EQ(desk.find(idOf(1)), nullptr) << "a refused process is on no list";
  JoinDesk closed({.size = 5});
  EXPECT_EQ(closed.take(idOf(1), someRequest(), now)->reason, Reason::kClosed);
}

TEST_F(Desk, ServesSoManyAtATime) {
  for (int i = 0; i < int(JoinDesk::kMost); ++i)
    EXPECT_EQ(ask(someRequest(), 10 + i), std::nullopt);
  EXPECT_EQ(ask(someRequest(), 9), Reason::kBusy);
  EXPECT_EQ(ask(someRequest(), 10), std::nullopt) << "it is on the list";
  desk.remove(idOf(10));
  EXPECT_EQ(ask(someRequest(), 9), std::nullopt);
}

TEST_F(Desk, DropsASilentCandidate) {
  EXPECT_EQ(ask(someRequest(), 1), std::nullopt);
  now.time += std::chrono::milliseconds(600);
  EXPECT_EQ(ask(someRequest(), 2), std::nullopt);
  EXPECT_EQ(desk.nextTick(), now.time + std::chrono::milliseconds(400));
  EXPECT_TRUE(desk.removeSilent(now.time).empty());
  now.time += std::chrono::milliseconds(400);
  EXPECT_EQ(desk.removeSilent(now.time), std::vector{idOf(1)});
  EXPECT_TRUE(desk.find(idOf(2)));
  EXPECT_FALSE(desk.find(idOf(1)));
}

}  // namespace
}  // namespace mooncake
