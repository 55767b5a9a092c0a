#pragma once

#include <memory>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace mooncake {

namespace transfer {
class TransferEngine;
}
class Engine;

// What get_engine() returns, for those who hand an engine on.
struct InnerTransferEngine {
  std::shared_ptr<transfer::TransferEngine> engine;
};

// For one job at a time: raises where another one runs on it, or where the engine has no key.
std::shared_ptr<Engine> lendForJob(const InnerTransferEngine& inner, std::string& jobKey);

// _C.TransferEngine and what its calls take and return.
void bindTransfer(pybind11::module_& m);

}  // namespace mooncake
