#include "ep/census.h"

#include <algorithm>
#include <string>

#include "group/operation.h"

namespace mooncake::ep {
namespace {

class Count final : public Algorithm {
 public:
  Count(Census& census, Ending& ending) : census_(census), ending_(ending) {}

  Status publish(Operation& op) override {
    MOONCAKE_TRY(census_.inputs);
    ByteWriter out;
    census_.mask.write(out);
    out.putRaw(std::as_bytes(std::span(census_.numbers)));
    const Bytes payload = out.take();
    std::ranges::copy(payload, op.payload());
    return op.begin(payload.size());
  }

  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    GroupRanks participants;
    for (const int r : op.ranks()) participants.add(r);
    const size_t count = census_.numbers.size();
    std::vector all(size_t(op.size()), std::vector<uint32_t>(count));
    for (const int r : op.ranks()) {
      const Slot& slot = op.slot(r);
      const size_t bytes = std::min<size_t>(slot.payloadBytes, op.group().slotBytes());
      const Bytes copy(slot.payload, slot.payload + bytes);
      ByteReader in(copy);
      participants &= GroupRanks::read(in);
      const ByteView raw = in.getRaw(count * sizeof(uint32_t));
      if (const Status whole = in.finish("a rank's number of tokens"); !whole.ok()) {
        MOONCAKE_TRY(op.unlessFenced());
        return whole;
      }
      std::ranges::copy(raw, std::as_writable_bytes(std::span(all[size_t(r)])).begin());
    }
    census_.all = std::move(all);
    ending_.participants = std::move(participants);
    return op.commit();
  }

  // The other ranks did it without us.
  void endSkipped(const Operation& op) {
    census_.all.assign(size_t(op.size()), std::vector<uint32_t>(census_.numbers.size()));
    ending_.participants = {};
    for (const int r : op.ranks()) ending_.participants.add(r);
    ending_.participants &= census_.mask;
  }

 private:
  Census& census_;
  Ending& ending_;
};

}  // namespace

Status count(const Memory& memory, Census& census, Ending& ending) {
  if (census.numbers.size() * sizeof(uint32_t) > memory.group.slotBytes() / 2) {
    census.inputs = {ErrorCode::kInvalidArgument, "dispatch: numbers of " +
                                                      std::to_string(census.numbers.size()) +
                                                      " ranks and experts do not fit into a slot"};
  }
  const Call what{.verb = Verb::kCountTokens,
                  .dtype = DType::kUInt32,
                  .goesOn = census.goesOn && !census.patience,
                  .count = census.numbers.size()};
  Operation op(memory.group, what, census.deadline);
  Count algorithm(census, ending);
  if (census.patience) op.skipAfter(*census.patience);
  MOONCAKE_TRY(op.run(algorithm));
  if (op.wasSkipped()) algorithm.endSkipped(op);
  return {};
}

}  // namespace mooncake::ep
