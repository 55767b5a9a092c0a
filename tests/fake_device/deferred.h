#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

// Operations of the CPU that streams run later, as those of a GPU: for tests that hold a stream.
namespace fake_device {

void setDeferred(bool isOn);

// Enqueues the operation on the stream of its first tensor, and puts its results on the stack.
// Returns false if it was not asked for, or if the host has to know the data: then nothing was done.
// An error that the shapes do not show ends the process.
bool defer(const c10::OperatorHandle& operation, torch::jit::Stack* stack);

}  // namespace fake_device
