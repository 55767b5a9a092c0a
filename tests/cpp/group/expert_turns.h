#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "draw.h"
#include "ep/buffer.h"

namespace mooncake::test {

// Dispatches and combines of one process. The tokens of a turn differ from those of any other turn
// and process, and the experts return their rows. The first turn in a series makes a buffer with its
// members, and ends the buffer before, as a Buffer in Python does after update_ep_member().
class ExpertTurns {
 public:
  struct Options {
    uint64_t seed;
    int rank, life, size;
    size_t tokens, hidden;
  };
  // The end of a turn. Ranks that took part, a bit each; the same on all ranks.
  struct Ended {
    Status status;
    uint32_t there = 0, back = 0;
    std::string wrong;  // the first row or sum that is wrong
  };

  explicit ExpertTurns(const Options& options)
      : options_(options), lives_(size_t(options.size), uint64_t(-1)) {}

  // All members of the series call it at the same place. `lives`: of its members, by rank.
  Ended turn(const Group& series, uint64_t number, std::vector<uint64_t> lives, Deadline deadline) {
    lives_ = std::move(lives);
    number_ = number;
    deadline_ = deadline;
    Ended ended;
    ended.status = makeBuffer(series);
    if (ended.status.ok()) ended.status = dispatch(ended);
    if (ended.status.ok()) ended.status = combine(ended);
    return ended;
  }
  void close() {
    if (buffer_) buffer_->close(Deadline::after(std::chrono::seconds(5)));
    buffer_.reset();
  }

 private:
  static constexpr int kPerRank = 2;
  static constexpr size_t kTopk = 2;

  Status makeBuffer(const Group& series) {
    if (buffer_ && series_ == series.topic()) return {};
    GroupOptions options{.name = series.name() + "/ep@" + std::to_string(series.topic()),
                         .rank = options_.rank,
                         .size = options_.size,
                         .env = series.env(),
                         .slotBytes = ep::slotBytesFor(options_.size),
                         .pushBytes = ep::kPushBytes};
    auto group =
        Group::createWithin(series.membership(), std::move(options), deadline_, series.roster());
    if (!group.ok()) return group.status();
    const ep::Shape shape = this->shape();
    auto buffer = ep::Buffer::create(std::move(*group), ep::sizeHint(shape), deadline_);
    if (!buffer.ok()) return buffer.status();
    const auto before = std::exchange(buffer_, std::move(*buffer));
    if (before) before->close(deadline_);
    series_ = series.topic();
    auto experts = buffer_->experts(shape.numExperts);
    if (!experts.ok()) return experts.status();
    experts_ = std::move(*experts);
    return buffer_->checkRoom(shape, *experts_);
  }

  ep::Shape shape() const {
    return {options_.size, kPerRank * options_.size, options_.tokens, options_.hidden};
  }
  int expertOf(int rank, size_t token, size_t place) const {
    Draw draw(mix(options_.seed + number_ * 1000 + size_t(rank) * 100 + token));
    const int first = draw.below(kPerRank * options_.size);
    const int step = 1 + draw.below(kPerRank * options_.size - 1);
    return (first + int(place) * step) % (kPerRank * options_.size);
  }
  // A small whole number, so that sums are exact.
  float valueOf(int rank, size_t token, size_t channel) const {
    const uint64_t key =
        mix(number_ * 100'000 + lives_[size_t(rank)] * 1000 + size_t(rank) * 100 + token);
    return float((key + channel * 7) % 101);
  }
  static uint16_t toBf16(float value) { return uint16_t(std::bit_cast<uint32_t>(value) >> 16); }
  bool isRow(const uint16_t* row, int rank, size_t token, float times) const {
    for (size_t i = 0; i < options_.hidden; ++i) {
      if (row[i] != toBf16(times * valueOf(rank, token, i))) return false;
    }
    return true;
  }
  static uint32_t bitsOf(const GroupRanks& ranks) {
    uint32_t bits = 0;
    ranks.forEach([&](int r) { bits |= 1u << r; });
    return bits;
  }
  // Runs a call on the thread of the buffer, in every second turn.
  Status run(std::function<Status(ep::Memory&)> call) {
    const auto task = buffer_->submit(std::move(call), number_ % 2 == 0);
    buffer_->await(*task, nullptr);
    return task->status();
  }

  Status dispatch(Ended& ended) {
    const size_t rows = size_t(options_.size) * options_.tokens;
    handle_ = std::make_shared<ep::Handle>();
    handle_->shape = shape();
    handle_->experts = experts_;
    handle_->tokens = options_.tokens;
    handle_->topk = kTopk;
    std::vector<uint16_t> x;
    for (size_t t = 0; t < options_.tokens; ++t) {
      for (size_t place = 0; place < kTopk; ++place)
        handle_->chosen.push_back(expertOf(options_.rank, t, place));
      for (size_t i = 0; i < options_.hidden; ++i)
        x.push_back(toBf16(valueOf(options_.rank, t, i)));
    }
    rows_.assign(kPerRank * rows * options_.hidden, 0);
    std::vector<int32_t> counts(kPerRank), sources(kPerRank * rows);
    std::vector<int64_t> ranges(kPerRank * size_t(options_.size));
    ep::DispatchCall call;
    call.x = x.data();
    call.mask = buffer_->callerMask();
    call.deadline = deadline_;
    call.handle = handle_;
    call.rows = reinterpret_cast<std::byte*>(rows_.data());
    call.counts = counts.data();
    call.sources = sources.data();
    call.ranges = ranges.data();
    ep::Ending ending;
    MOONCAKE_TRY(run([&](ep::Memory& memory) { return ep::dispatch(memory, call, ending); }));
    ended.there = bitsOf(ending.participants);
    for (size_t local = 0; local < kPerRank; ++local) {
      for (int from = 0; from < options_.size; ++from) {
        const int64_t range = ranges[local * size_t(options_.size) + size_t(from)];
        checkRows(ended, local, from, size_t(range >> 32), size_t(range & 0xffffffff), sources);
      }
    }
    return {};
  }

  // Checks the rows that came from a rank for one expert of ours: one for each of its tokens that
  // chose the expert, if the rank took part.
  void checkRows(Ended& ended, size_t local, int from, size_t begin, size_t count,
                 const std::vector<int32_t>& sources) const {
    const std::string name = "expert " + std::to_string(local) + " has of rank " +
                             std::to_string(from) + ' ' + std::to_string(count) + " rows";
    const int expert = experts_->expertsOf(options_.rank)[local];
    std::vector<size_t> expected;
    for (size_t t = 0; t < options_.tokens && (ended.there >> from & 1); ++t) {
      for (size_t place = 0; place < kTopk; ++place) {
        if (expertOf(from, t, place) == expert) expected.push_back(t);
      }
    }
    if (count != expected.size())
      return note(ended, name + " in place of " + std::to_string(expected.size()));
    for (size_t i = 0; i < count; ++i) {
      const size_t row = local * size_t(options_.size) * options_.tokens + begin + i;
      if (size_t(sources[row]) != expected[i] ||
          !isRow(&rows_[row * options_.hidden], from, expected[i], 1))
        return note(ended, name + ", and row " + std::to_string(i) + " is wrong");
    }
  }

  Status combine(Ended& ended) {
    std::vector<uint16_t> back(options_.tokens * options_.hidden);
    const auto missing = std::make_unique<bool[]>(options_.tokens);
    const std::vector<float> weights(kTopk * options_.tokens, 1);
    ep::CombineCall call;
    call.x = reinterpret_cast<const std::byte*>(rows_.data());
    call.rowStride = 2 * options_.hidden;
    call.chosen = handle_->chosen;
    call.weights = weights.data();
    call.mask = buffer_->callerMask();
    call.deadline = deadline_;
    call.handle = handle_;
    call.combined = back.data();
    call.missing = missing.get();
    ep::Ending ending;
    MOONCAKE_TRY(run([&](ep::Memory& memory) { return ep::combine(memory, call, ending); }));
    ended.back = bitsOf(ending.participants);
    for (size_t t = 0; t < options_.tokens; ++t) {
      size_t times = 0;
      for (size_t place = 0; place < kTopk; ++place)
        times += ended.back >> experts_->owner(handle_->chosen[t * kTopk + place]) & 1;
      if (missing[t] != (times < kTopk) ||
          !isRow(&back[t * options_.hidden], options_.rank, t, float(times)))
        note(ended, "the sum of token " + std::to_string(t) + " is wrong");
    }
    return {};
  }
  static void note(Ended& ended, const std::string& text) {
    if (ended.wrong.empty()) ended.wrong = text;
  }

  const Options options_;
  std::vector<uint64_t> lives_;  // by rank
  uint64_t number_ = 0;          // of the turn
  Deadline deadline_ = Deadline::at(Clock::time_point::max());
  uint64_t series_ = 0;  // topic of the buffer's series
  std::shared_ptr<ep::Buffer> buffer_;
  std::shared_ptr<const ep::ExpertMap> experts_;
  std::shared_ptr<ep::Handle> handle_;
  std::vector<uint16_t> rows_;  // of the dispatch
};

}  // namespace mooncake::test
