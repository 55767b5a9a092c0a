#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "transfer/segment.h"

namespace mooncake::transfer {

// The segments that an engine has opened, by name and by id. Any thread.
class Directory {
 public:
  static constexpr int32_t kOurs = 0;  // LOCAL_SEGMENT of transfer_engine_c.h

  // `context` must outlive the directory. `name` is our own.
  Directory(const SegmentContext& context, std::string name);

  const std::string& name() const { return name_; }
  // Returns the segment, and connects to its engine if it was not open yet. Fails if that engine
  // cannot be reached.
  Result<std::shared_ptr<Segment>> open(const std::string& name, Deadline deadline);
  // Checks that the engine of this name answers. Needs no metadata server while a peer of this name
  // is connected.
  Status probe(const std::string& name, Deadline deadline) const;
  std::shared_ptr<Segment> find(int32_t id) const;  // null if no segment has this id
  std::vector<std::shared_ptr<Segment>> all() const;
  // Forgets the segment: the next open() asks its engine again. kInvalid: no segment has this id.
  Code close(int32_t id);
  // Asks the engines of all segments again. Returns the first error.
  Status refresh(Deadline deadline);

 private:
  const SegmentContext& context_;
  const std::string name_;
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<Segment>> byName_ GUARDED_BY(mutex_);
  std::map<int32_t, std::shared_ptr<Segment>> byId_ GUARDED_BY(mutex_);
  int32_t lastId_ GUARDED_BY(mutex_) = kOurs;
};

}  // namespace mooncake::transfer
