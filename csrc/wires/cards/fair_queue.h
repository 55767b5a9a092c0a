#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>

namespace mooncake {

// Items of several owners that wait for room: each owner's in order, and the owners in turn. Not
// thread-safe.
template <typename T>
class FairQueue {
 public:
  bool empty() const { return turns_.empty(); }
  size_t owners() const { return turns_.size(); }
  void push(const void* owner, std::unique_ptr<T> item) {
    auto& line = lines_[owner];
    if (line.empty()) turns_.push_back(owner);
    line.push_back(std::move(item));
  }
  // Moves the owner that is first in turn behind all other owners.
  void passTurn() {
    turns_.push_back(turns_.front());
    turns_.pop_front();
  }
  T& front() { return *lines_.find(turns_.front())->second.front(); }
  std::unique_ptr<T> pop() {
    const auto line = lines_.find(turns_.front());
    std::unique_ptr<T> item = std::move(line->second.front());
    line->second.pop_front();
    turns_.pop_front();
    if (line->second.empty()) {
      lines_.erase(line);
    } else {
      turns_.push_back(line->first);
    }
    return item;
  }

 private:
  std::map<const void*, std::deque<std::unique_ptr<T>>> lines_;
  std::deque<const void*> turns_;
};

}  // namespace mooncake
