#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>

namespace mooncake {

// Work in pieces. Its owner does it; other threads help if they come in time.
class SharedWork {
 public:
  using DoPiece = std::function<void(size_t piece)>;  // any thread, each piece once
  SharedWork(size_t pieces, DoPiece doPiece) : pieces_(pieces), doPiece_(std::move(doPiece)) {}

  // Call it on another thread. It may run long after finish(), and then finds nothing to do.
  void help() {
    helpers_.fetch_add(1);  // first: a thread that sees no piece left also sees this helper
    work();
    if (helpers_.fetch_sub(1) == 1) helpers_.notify_all();
  }
  // Call it on the owner's thread. When it returns every piece is done. It waits only for pieces
  // that helpers are working on.
  void finish() {
    work();
    for (size_t others; (others = helpers_.load()) != 0;) helpers_.wait(others);
  }

 private:
  void work() {
    for (size_t piece; (piece = next_.fetch_add(1)) < pieces_;) doPiece_(piece);
  }

  const size_t pieces_;
  const DoPiece doPiece_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> helpers_{0};
};

}  // namespace mooncake
