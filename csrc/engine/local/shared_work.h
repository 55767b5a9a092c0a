#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <utility>

namespace mooncake {

// Work in pieces that its owner does, with the help of other threads as far as those come in time.
class SharedWork {
 public:
  using DoPiece = std::function<void(size_t piece)>;  // any thread, each piece once
  SharedWork(size_t pieces, DoPiece doPiece) : pieces_(pieces), doPiece_(std::move(doPiece)) {}

  // On another thread. Long after finish() it still may be called: it finds nothing to do then.
  void help() {
    helpers_.fetch_add(1);  // before a piece is taken: whoever sees that none is left sees us, too
    work();
    if (helpers_.fetch_sub(1) == 1) helpers_.notify_all();
  }
  // On the owner's thread. When it returns every piece is done. It waits at most for those that
  // others are in the middle of.
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
