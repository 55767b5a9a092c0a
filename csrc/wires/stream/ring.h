#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mooncake {

// A queue that allocates only while it grows; std::deque does not promise that.
template <typename T>
class Ring {
 public:
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  T& operator[](size_t index) { return slots_[(first_ + index) % slots_.size()]; }
  T& front() { return (*this)[0]; }

  void push(T item) {
    if (count_ == slots_.size()) grow();
    ++count_;
    (*this)[count_ - 1] = std::move(item);
  }
  void pop() {
    front() = T();
    first_ = (first_ + 1) % slots_.size();
    --count_;
  }
  void clear() {
    while (!empty()) pop();
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    for (size_t i = 0; i < count_; ++i) larger[i] = std::move((*this)[i]);
    slots_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> slots_;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace mooncake
