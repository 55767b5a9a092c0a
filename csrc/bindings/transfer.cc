#include "bindings/transfer.h"

#include <stdexcept>
#include <utility>

#include <pybind11/stl.h>

#include "bindings/transfer_calls.h"
#include "transfer/topology.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using transfer::Notification;
using transfer::Opcode;
using transfer::TransferEngine;
using Addresses = TransferCalls::Addresses;
using namespace py::literals;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// An unscoped enumeration, so that in Python each value equals its number.
enum PythonOpcode { kPythonRead = 0, kPythonWrite = 1 };
Opcode opcodeOf(PythonOpcode opcode) {
  return opcode == kPythonRead ? Opcode::kRead : Opcode::kWrite;
}

InnerTransferEngine innerOf(const TransferCalls& calls) {
  if (!calls.engine()) throw py::value_error("the engine is not initialized");
  return {calls.engine()};
}

// Keys are the names in EngineCounters, in snake case.
py::dict countersOf(const TransferCalls& calls) {
  const EngineCounters now = innerOf(calls).engine->counters();
  return py::dict("opened"_a = now.opened, "reused"_a = now.reused, "active"_a = now.active,
                  "pending"_a = now.pending, "retries"_a = now.retries,
                  "connections"_a = now.connections, "collected"_a = now.collected,
                  "bytes_read"_a = now.bytesRead, "bytes_written"_a = now.bytesWritten,
                  "cards_read"_a = now.byCards.read, "cards_written"_a = now.byCards.written,
                  "cards_retried"_a = now.byCards.retried);
}

py::dict limitsOf(const TransferCalls& calls) {
  const transfer::TransferLimits most = innerOf(calls).engine->limits();
  return py::dict("transfers"_a = most.transfers, "io_threads"_a = most.ioThreads,
                  "registrations"_a = most.registrations,
                  "batched_transfers"_a = most.batchedTransfers);
}

// Wraps one buffer into lists of length one.
auto single(Opcode opcode) {
  return [opcode](TransferCalls& calls, const std::string& target, uint64_t buffer, uint64_t remote,
                  uint64_t bytes, const std::string&) {
    return calls.transfer(target, {buffer}, {remote}, {bytes}, opcode, std::nullopt);
  };
}
auto list(Opcode opcode) {
  return [opcode](TransferCalls& calls, const std::string& target, const Addresses& buffers,
                  const Addresses& remote, const Addresses& bytes, const std::string&) {
    return calls.transfer(target, buffers, remote, bytes, opcode, std::nullopt);
  };
}
auto submitList(Opcode opcode) {
  return [opcode](TransferCalls& calls, const std::string& target, const Addresses& buffers,
                  const Addresses& remote, const Addresses& bytes, const std::string&) {
    return calls.submit(target, buffers, remote, bytes, opcode);
  };
}

void bindTransfers(py::class_<TransferCalls, std::shared_ptr<TransferCalls>>& c) {
  const auto target = py::arg("target_hostname");
  const auto buffer = py::arg("buffer"), remote = py::arg("peer_buffer_address");
  const auto length = py::arg("length"), opcode = py::arg("opcode");
  const auto buffers = py::arg("buffers"), remotes = py::arg("peer_buffer_addresses");
  const auto lengths = py::arg("lengths");
  const auto notify = py::arg("notify") = py::none();
  const auto hint = py::arg("transport_hint") = "";
  c.def("transfer_sync_write", single(Opcode::kWrite), target, buffer, remote, length, hint,
        Unlocked());
  c.def("transfer_sync_read", single(Opcode::kRead), target, buffer, remote, length, hint,
        Unlocked());
  c.def(
      "transfer_sync",
      [](TransferCalls& calls, const std::string& to, uint64_t from, uint64_t there, uint64_t bytes,
         PythonOpcode op, const std::optional<Notification>& note, const std::string&) {
        return calls.transfer(to, {from}, {there}, {bytes}, opcodeOf(op), note);
      },
      target, buffer, remote, length, opcode, notify, hint, Unlocked());
  c.def("batch_transfer_sync_write", list(Opcode::kWrite), target, buffers, remotes, lengths, hint,
        Unlocked());
  c.def("batch_transfer_sync_read", list(Opcode::kRead), target, buffers, remotes, lengths, hint,
        Unlocked());
  c.def(
      "batch_transfer_sync",
      [](TransferCalls& calls, const std::string& to, const Addresses& from, const Addresses& there,
         const Addresses& bytes, PythonOpcode op, const std::optional<Notification>& note,
         const std::string&) { return calls.transfer(to, from, there, bytes, opcodeOf(op), note); },
      target, buffers, remotes, lengths, opcode, notify, hint, Unlocked());
  c.def("batch_transfer_async_write", submitList(Opcode::kWrite), target, buffers, remotes, lengths,
        hint, Unlocked());
  c.def("batch_transfer_async_read", submitList(Opcode::kRead), target, buffers, remotes, lengths,
        hint, Unlocked());
  c.def(
      "batch_transfer_async",
      [](TransferCalls& calls, const std::string& to, const Addresses& from, const Addresses& there,
         const Addresses& bytes, PythonOpcode op,
         const std::string&) { return calls.submit(to, from, there, bytes, opcodeOf(op)); },
      target, buffers, remotes, lengths, opcode, hint, Unlocked());
  c.def(
      "transfer_submit_write",
      [](TransferCalls& calls, const std::string& to, uint64_t from, uint64_t there, uint64_t bytes,
         const std::string&) { return calls.submit(to, {from}, {there}, {bytes}, Opcode::kWrite); },
      target, buffer, remote, length, hint, Unlocked());
  c.def("get_batch_transfer_status", &TransferCalls::awaitAll, py::arg("batch_ids"), Unlocked());
  c.def("transfer_check_status", &TransferCalls::check, py::arg("batch_id"), Unlocked());
}

void bindMemory(py::class_<TransferCalls, std::shared_ptr<TransferCalls>>& c) {
  const auto location = py::arg("location") = "*";
  c.def("register_memory", &TransferCalls::registerMemory, py::arg("buffer_addr"),
        py::arg("capacity"), location, Unlocked());
  c.def("unregister_memory", &TransferCalls::unregisterMemory, py::arg("buffer_addr"), Unlocked());
  c.def("batch_register_memory", &TransferCalls::registerAll, py::arg("buffer_addresses"),
        py::arg("capacities"), location, Unlocked());
  c.def("batch_unregister_memory", &TransferCalls::unregisterAll, py::arg("buffer_addresses"),
        Unlocked());
  c.def("allocate_managed_buffer", &TransferCalls::allocate, py::arg("length"), Unlocked());
  c.def("free_managed_buffer", &TransferCalls::free, py::arg("buffer_addr"), py::arg("length"),
        Unlocked());
  c.def(
      "write_bytes_to_buffer",
      [](TransferCalls& calls, uint64_t address, const py::bytes& bytes, uint64_t length) {
        return calls.writeHere(address, bytes, length);
      },
      py::arg("dest_address"), py::arg("src_ptr"), py::arg("length"));
  c.def(
      "read_bytes_from_buffer",
      [](TransferCalls& calls, uint64_t address, uint64_t length) {
        const auto read = calls.readHere(address, length);
        if (!read) throw py::value_error("that memory is not registered with this engine");
        return py::bytes(*read);
      },
      py::arg("source_address"), py::arg("length"));
}

// Transfers in the order of a stream, whose handle is a number. They raise RuntimeError.
void bindStreams(py::class_<TransferCalls, std::shared_ptr<TransferCalls>>& c) {
  const auto throwIf = [](const Status& failed) {
    if (!failed.ok()) throw std::runtime_error(failed.error().message);
  };
  const auto target = py::arg("target_hostname");
  const auto stream = py::arg("stream_ptr") = 0, hint = py::arg("transport_hint") = "";
  for (const auto& [verb, opcode] : {std::pair("write", Opcode::kWrite), {"read", Opcode::kRead}}) {
    const std::string name = std::string("transfer_") + verb + "_on_cuda";
    c.def(
        name.c_str(),
        [throwIf, opcode = opcode](TransferCalls& calls, const std::string& to, uint64_t buffer,
                                   uint64_t remote, uint64_t bytes, uint64_t on,
                                   const std::string&) {
          throwIf(calls.transferOnStream(to, {buffer}, {remote}, {bytes}, opcode, on));
        },
        target, py::arg("buffer"), py::arg("peer_buffer_address"), py::arg("length"), stream, hint,
        Unlocked());
    c.def(("batch_" + name).c_str(),
          [throwIf, opcode = opcode](TransferCalls& calls, const std::string& to,
                                     const Addresses& buffers, const Addresses& remotes,
                                     const Addresses& lengths, uint64_t on, const std::string&) {
            throwIf(calls.transferOnStream(to, buffers, remotes, lengths, opcode, on));
          },
          target, py::arg("buffers"), py::arg("peer_buffer_addresses"), py::arg("lengths"), stream,
          hint, Unlocked());
  }
}

}  // namespace

std::shared_ptr<Engine> lendForJob(const InnerTransferEngine& inner, std::string& jobKey) {
  TransferEngine& engine = *inner.engine;
  if (!engine.hasKey())
    throw py::value_error(
        "the transfer engine has no key, and a job needs one: set MOONCAKE_JOB_KEY before "
        "initialize()");
  auto lent = engine.lend(inner.engine);
  if (!lent) {
    throw py::value_error(
        "the transfer engine that set_transfer_engine() was given is closed, or another group of "
        "processes runs on it: destroy that one first");
  }
  jobKey = *engine.env().jobKey;
  return lent;
}

void bindTransfer(py::module_& m) {
  auto opcode = py::enum_<PythonOpcode>(m, "TransferOpcode", py::arithmetic());
  opcode.value("Read", kPythonRead).value("Write", kPythonWrite);
  opcode.attr("READ") = opcode.attr("Read");
  opcode.attr("WRITE") = opcode.attr("Write");

  py::class_<Notification>(m, "TransferNotify")
      .def(py::init<>())
      .def(py::init([](std::string name, std::string message) {
             return Notification{std::move(name), std::move(message)};
           }),
           py::arg("name"), py::arg("msg"))
      .def_readwrite("name", &Notification::name)
      .def_readwrite("msg", &Notification::message);

  py::class_<InnerTransferEngine>(m, "InnerTransferEngine")
      .def_property_readonly(
          "has_key", [](const InnerTransferEngine& inner) { return inner.engine->hasKey(); });

  auto engine = py::class_<TransferCalls, std::shared_ptr<TransferCalls>>(m, "TransferEngine");
  engine.def(py::init([] {
    // Python may drop the last reference with its lock held. close() waits for threads that may
    // need the lock.
    return std::shared_ptr<TransferCalls>(new TransferCalls, [](TransferCalls* calls) {
      std::optional<py::gil_scoped_release> unlocked;
      if (PyGILState_Check()) unlocked.emplace();
      delete calls;
    });
  }));
  engine.attr("TransferOpcode") = opcode;
  engine.def("initialize", &TransferCalls::initialize, Unlocked());
  engine.def(
      "initialize_ext",
      [](TransferCalls& calls, const std::string& name, const std::string& server,
         const std::string& protocol, const std::optional<std::string>& devices,
         const std::string& kind) {
        const bool isWhole =
            server == "P2PHANDSHAKE" || kind.empty() || server.find("://") != std::string::npos;
        return calls.initialize(name, isWhole ? server : kind + "://" + server, protocol, devices);
      },
      Unlocked());
  engine.def("get_rpc_port", &TransferCalls::rpcPort);
  bindMemory(engine);
  bindTransfers(engine);
  bindStreams(engine);
  engine.def(
      "get_local_topology",
      [](TransferCalls&, const std::optional<std::string>& devices) {
        return transfer::describeTopology(devices.value_or(""));
      },
      py::arg("device_name") = py::none(), Unlocked());
  engine.def("get_first_buffer_address", &TransferCalls::firstBuffer, py::arg("segment_name"),
             Unlocked());
  engine.def("warmup_efa_segment", &TransferCalls::warmUp, py::arg("segment_name"), Unlocked());
  engine.def("get_notifies", &TransferCalls::takeNotifications, Unlocked());
  engine.def("send_probe", &TransferCalls::probe, py::arg("peer_server_name"), Unlocked());
  engine.def("get_transport", &TransferCalls::transportTo, py::arg("target_hostname"), Unlocked());
  engine.def("get_counters", &countersOf);
  engine.def("get_limits", &limitsOf);
  engine.def("get_engine", &innerOf);
  engine.def("get_engine_ptr",
             [](const TransferCalls& calls) { return uintptr_t(innerOf(calls).engine.get()); });
  m.def("close_transfer_engines", &TransferCalls::closeAll, Unlocked());
}

}  // namespace mooncake
