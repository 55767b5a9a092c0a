// The decoders of the session port: whatever they take is, byte for byte, what they would write.
#include "fuzz.h"
#include "transfer/segment_description.h"

using mooncake::ByteView;
using mooncake::transfer::Question;
using mooncake::transfer::SegmentDescription;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ByteView input(reinterpret_cast<const std::byte*>(data), size);
  if (const auto segment = SegmentDescription::decode(input); segment.ok())
    mooncake::fuzz::require(std::ranges::equal(segment->encode(), input));
  if (const auto question = Question::decode(input); question.ok())
    mooncake::fuzz::require(std::ranges::equal(question->encode(), input));
  return 0;
}

void mooncake::fuzz::writeSeeds(const Seeds& seed) {
  SegmentDescription segment{.name = "127.0.0.1:15000", .protocol = "tcp", .endpoint = Bytes(40)};
  seed("segment-0", segment.encode());
  for (uint64_t i = 0; i < 3; ++i) segment.buffers.push_back({{4096 * i, 4096, i + 1}, 3, "cpu:0"});
  seed("segment-3", segment.encode());
  seed("describe", Question{.kind = Question::Kind::kDescribe}.encode());
  seed("probe", Question{.kind = Question::Kind::kProbe}.encode());
}
