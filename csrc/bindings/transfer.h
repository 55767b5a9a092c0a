#pragma once

#include <memory>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

namespace transfer {
class TransferEngine;
}
class Engine;

// Result of get_engine(), for programs that hand an engine on.
struct InnerTransferEngine {
  std::shared_ptr<transfer::TransferEngine> engine;
};

// Lends the engine to one job at a time. Throws if another job uses it, or if it has no key. Sets
// `jobKey`.
std::shared_ptr<Engine> lendForJob(const InnerTransferEngine& inner, std::string& jobKey);

// Binds _C.TransferEngine and the classes of its arguments and results.
void bindTransfer(pybind11::module_& m);

}  // namespace mooncake
