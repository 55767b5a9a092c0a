#pragma once

namespace fake_device {

// From here on, copies between devices and the host take so much longer, in which they use no core,
// as those of a GPU's copy engines. 0: no longer than they need.
void slowCopies(double bytesPerSecond);

}  // namespace fake_device
