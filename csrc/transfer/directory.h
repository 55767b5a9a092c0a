#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/segment.h"

namespace mooncake::transfer {

// The segments that an engine knows, by name and by number. Any thread.
class Directory {
 public:
  static constexpr int32_t kOurs = 0;  // LOCAL_SEGMENT of transfer_engine_c.h

  // `context` outlives it. `name`: our own.
  Directory(const SegmentContext& context, std::string name);

  const std::string& name() const { return name_; }
  // Whoever is not known yet is asked who it is. The error is why it cannot be reached.
  Result<std::shared_ptr<Segment>> open(const std::string& name, Deadline deadline);
  // Whether the engine of this name answers. Needs no metadata server while a peer of this name
  // stands connected.
  Status probe(const std::string& name, Deadline deadline) const;
  std::shared_ptr<Segment> find(int32_t id) const;  // null: there is none
  std::vector<std::shared_ptr<Segment>> all() const;
  // What is known of it is asked for again when it is opened next.
  Code close(int32_t id);
  // Asks all of them again. The first error.
  Status refresh(Deadline deadline);

 private:
  const SegmentContext& context_;
  const std::string name_;
  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, std::shared_ptr<Segment>> byName_;
  std::map<int32_t, std::shared_ptr<Segment>> byId_;
  int32_t lastId_ = kOurs;
};

}  // namespace mooncake::transfer
