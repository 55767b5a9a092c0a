#pragma once

namespace mooncake {

// Throws if the current stream of the accelerator that the program uses is being recorded into a
// graph. `why` follows "and" in the error. With Python's lock.
void refuseCaptureOfConstruction(const char* why);

}  // namespace mooncake
