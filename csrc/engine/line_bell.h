#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>

#include "base/result.h"
#include "base/wait.h"
#include "engine/engine.h"
#include "engine/memory/arena.h"

namespace mooncake {

// The one place at which all waiters of a line sleep. A line: the groups that follow one another
// under one name. All windows of a line name this doorbell, so a waiter need not know to which of
// them its news comes. Lives until no peer can ring it any more: each window keeps it as long as
// its own memory. May outlive the engine.
class LineBell {
 public:
  static Result<std::shared_ptr<LineBell>> create(Engine& engine) {
    auto block = engine.allocate(sizeof(Doorbell));
    if (!block.ok()) return block.error();
    return std::shared_ptr<LineBell>(new LineBell(engine.sharedArena(), std::move(*block)));
  }

  Doorbell& doorbell() const { return *reinterpret_cast<Doorbell*>(block_.data()); }
  uint64_t offset() const { return block_.offset(); }  // of the doorbell, in the engine's arena
  // Bumped when a member's end, a view or a failure ends the waits of any group of the line.
  Interrupt& interrupt() { return interrupt_; }

 private:
  LineBell(std::shared_ptr<Arena> arena, ArenaBlock block)
      : arena_(std::move(arena)), block_(std::move(block)) {
    new (block_.data()) Doorbell;
  }

  const std::shared_ptr<Arena> arena_;
  const ArenaBlock block_;
  Interrupt interrupt_;
};

}  // namespace mooncake
