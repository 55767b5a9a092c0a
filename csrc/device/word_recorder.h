#pragma once

#include "base/result.h"

namespace mooncake {

// An accelerator whose words of streams can be recorded into graphs, or may be.
class WordRecorder {
 public:
  virtual ~WordRecorder() = default;

  // Ok if writeWord() and awaitWord() can be recorded, and replays then do them. Records some into a
  // graph of its own to see that, also while a capture of the program is on. That graph never runs.
  virtual Status checkRecordedWords(int device) = 0;
};

}  // namespace mooncake
