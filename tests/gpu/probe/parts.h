#pragma once

// The parts of the probe. Each runs in a process of its own and prints lines that begin with its
// name in brackets; answers.md has the meaning of each. A part ends its process if a call of
// the driver fails that must not.
namespace probe {

// Properties of the device and of the driver.
void device();
// How many waiting streams hold up another stream.
void streams();
// Which streams share a hardware queue: those that one waiting stream holds up.
void queues();
// Which calls of the driver wait for a kernel that spins, or for a stream that waits for a word.
void calls(bool isKernel);
// Words of streams and external events in replays; questions of other threads during a capture.
void graphs();
// Attributes of addresses in a thread without a context.
void addresses();
// Microseconds of words, launches and small copies.
void latency();
// A kernel reads shared memory while the process that made it is killed.
void killedWhileRead();
// The device copies memory of CUDA IPC while the process that made it is killed.
void killedWhileCopied();
// Barriers of several processes on one device, by kernels that wait for each other.
void barrier(int ranks);

}  // namespace probe
