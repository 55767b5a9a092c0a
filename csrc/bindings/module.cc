#include <algorithm>
#include <optional>
#include <set>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include "backend/backend_env.h"
#include "backend/batch_work.h"
#include "backend/child_options.h"
#include "backend/collective_work.h"
#include "backend/completions.h"
#include "backend/device/device_work.h"
#include "backend/device/kernel_work.h"
#include "backend/device/symmetric_allocator.h"
#include "backend/drains.h"
#include "backend/errors.h"
#include "backend/failure_error.h"
#include "backend/message_work.h"
#include "backend/mooncake_backend.h"
#include "backend/named_group.h"
#include "backend/shrinking.h"
#include "backend/signals.h"
#include "bindings/capture.h"
#include "bindings/ep.h"
#include "bindings/for_tests.h"
#include "bindings/futures.h"
#include "bindings/transfer.h"
#include "device/accelerators.h"
#include "device/cuda/kernel_image.h"
#include "device/device_report.h"
#include "engine/contract/registry.h"
#include "engine/env.h"
#include "group/group_env.h"
#include "group/group_state.h"
#include "wires/nic/fabric_env.h"
#include "wires/nic/libfabric/report.h"

namespace py = pybind11;
using mooncake::BackendOptions;
using mooncake::BatchWork;
using mooncake::Clock;
using mooncake::CollectiveWork;
using mooncake::Deadline;
using mooncake::DeviceWork;
using mooncake::ErrorCode;
using mooncake::FailureError;
using mooncake::Farewell;
using mooncake::GroupFacts;
using mooncake::KernelWork;
using mooncake::MessageWork;
using mooncake::MissingParts;
using mooncake::MooncakeBackend;
using mooncake::RaisedBySignal;

namespace {

// Its destructor releases Python's lock: see Leaving::close().
class PythonBackend final : public MooncakeBackend {
 public:
  using MooncakeBackend::MooncakeBackend;
  ~PythonBackend() override {
    std::optional<py::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    leaving().close();
  }

  // Releases Python's lock. abort() runs hooks, and they wait for threads that need the lock to
  // record what was called.
  void abort() override {
    std::optional<py::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    MooncakeBackend::abort();
  }

  // Returns whether one of these ranks was in no earlier call. Called with Python's lock held.
  bool noteLosses(const std::vector<int>& ranks) {
    const size_t before = noted_.size();
    noted_.insert(ranks.begin(), ranks.end());
    return noted_.size() > before;
  }

  bool supportsSplitting() const override { return true; }
  // split() and merge() lack `override`, because c10d::Backend declares them like this only since
  // torch 2.9. split() is called on every rank of this group. The new group shares this one's
  // engine and job.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& opts) {
    BackendOptions options =
        optionsOfSplit(group(), ranks, *opts);  // raises on all, members or not
    const auto place = std::find(ranks.begin(), ranks.end(), getRank());
    if (place == ranks.end()) return nullptr;
    return child(store, *opts, [&] {
      return c10::make_intrusive<PythonBackend>(store, int(place - ranks.begin()),
                                                int(ranks.size()), std::move(options), this);
    });
  }
  // Since torch 2.10, so without `override`. Called on the ranks that stay. The caller destroys this
  // group afterwards, and with it the job, if the new group did not take the job over.
  bool supportsShrinking() const { return true; }
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& excluded, int flags = 0,
                                     const c10::intrusive_ptr<Options>& opts = nullptr) {
    std::optional<py::gil_scoped_release> unlocked;
    if (PyGILState_Check()) unlocked.emplace();
    if (leaving().hasLeft())
      mooncake::throwError({ErrorCode::kAborted, mooncake::LiveGroup::kDestroyed});
    mooncake::Shrinking shrinking(group(), excluded);
    shrinking.agree();
    constexpr int kAbort = 1;  // torch.distributed.SHRINK_ABORT
    if ((flags & kAbort) != 0) abort();
    auto made =
        c10::make_intrusive<PythonBackend>(c10::intrusive_ptr<c10d::Store>(), shrinking.rank(),
                                           shrinking.size(), shrinking.options(opts.get()), this);
    made->leaving().takeOver(leaving());
    return made;
  }
  // Makes a group of processes that may not know each other yet: a job of its own.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& opts, const int& rank,
                                    const int& size) {
    return child(store, *opts, [&] {
      return c10::make_intrusive<PythonBackend>(store, rank, size, optionsOfMerge(group(), *opts),
                                                nullptr);
    });
  }

 private:
  // torch asks once for each device type of a backend. All of them get the same group.
  template <typename Make>
  c10::intrusive_ptr<Backend> child(const c10::intrusive_ptr<c10d::Store>& store,
                                    const Options& opts, Make&& make) {
    auto known = lastChild_.lock();
    if (known && lastStore_ == store &&
        known->group().options().groupName == mooncake::groupNameIn(opts))
      return known;
    c10::intrusive_ptr<MooncakeBackend> made = make();
    lastStore_ = store;
    lastChild_ = c10::weak_intrusive_ptr<MooncakeBackend>(made);
    return made;
  }

  std::set<int> noted_;
  c10::intrusive_ptr<c10d::Store> lastStore_;
  c10::weak_intrusive_ptr<MooncakeBackend> lastChild_{c10::intrusive_ptr<MooncakeBackend>()};
};

c10::intrusive_ptr<c10d::ProcessGroup> groupOf(const c10::intrusive_ptr<c10d::Store>& store,
                                               const c10::intrusive_ptr<PythonBackend>& backend,
                                               const std::vector<std::string>& names) {
  const std::vector<c10::Device> devices(names.begin(), names.end());
  return c10::make_intrusive<mooncake::NamedGroup>(store, backend, devices);
}

// torch's split_group() makes deep copies of the options, which its own class does not support.
class SplitOptions final : public c10d::Backend::Options {
 public:
  explicit SplitOptions(const c10d::Backend::Options& options) : Options(options) {}
};

c10::intrusive_ptr<SplitOptions> splitOptionsOf(PythonBackend& backend) {
  return c10::make_intrusive<SplitOptions>(*backend.getBackendOptions());
}

// Applies the dict of MooncakeBackendOptions.for_group() over the environment's settings.
void apply(const py::dict& options, BackendOptions& out) {
  const auto given = [&](const char* key) {
    return options.contains(key) && !options[key].is_none();
  };
  if (given("active_ranks")) out.activeRanks = options["active_ranks"].cast<at::Tensor>();
  if (given("reads_active_ranks"))
    out.readsActiveRanks = options["reads_active_ranks"].cast<bool>();
  if (given("transports"))
    out.env.transports = options["transports"].cast<std::vector<std::string>>();
  if (given("host_ip")) out.env.hostIp = options["host_ip"].cast<std::string>();
  if (given("devices")) out.env.fabricDevices = options["devices"].cast<std::vector<std::string>>();
  if (given("engine")) {
    std::string key;
    out.engine = mooncake::lendForJob(options["engine"].cast<mooncake::InnerTransferEngine>(), key);
    out.env.jobKey = std::move(key);
  }
  if (given("launcher_key")) out.launcherKey = options["launcher_key"].cast<std::string>();
  if (given("is_newcomer")) out.isNewcomer = options["is_newcomer"].cast<bool>();
  if (given("join_token")) {
    const auto token = options["join_token"].cast<std::string>();  // of bytes
    const auto bytes = std::as_bytes(std::span(token));
    out.joinToken.assign(bytes.begin(), bytes.end());
  }
  if (given("may_begin")) out.mayBegin = options["may_begin"].cast<bool>();
  if (given("max_group_size")) out.capacity = options["max_group_size"].cast<int>();
  using LostRanks = BackendOptions::LostRanks;
  if (given("lost_ranks_stay_until"))
    out.lostRanks = options["lost_ranks_stay_until"].cast<std::string>() == "synced"
                        ? LostRanks::kStayUntilSynced
                        : LostRanks::kStayUntilDeactivated;
  if (given("on_failure")) out.raises = options["on_failure"].cast<std::string>() == "raise";
  if (given("lost_messages"))
    out.lostMessagesReturn = options["lost_messages"].cast<std::string>() == "return";
  if (given("failure_timeout")) {
    out.env.failureTimeout = std::chrono::duration_cast<std::chrono::milliseconds>(
        options["failure_timeout"].cast<std::chrono::duration<double>>());
  }
  if (given("message_timeout")) {
    out.messageTimeout = std::chrono::duration_cast<std::chrono::milliseconds>(
        options["message_timeout"].cast<std::chrono::duration<double>>());
  }
}

mooncake::Result<mooncake::PeerTable> peerTableOf(const std::string& path) {
  if (path.empty()) return mooncake::PeerTable();
  auto table = mooncake::PeerTable::read(path);
  if (!table.ok())
    return mooncake::Error{table.error().code, "MOONCAKE_PEER_TABLE: " + table.error().message};
  return table;
}

c10::intrusive_ptr<PythonBackend> createBackend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::vector<int> globalRanks,
    std::string groupId, std::chrono::duration<double> timeout, std::string backendName,
    const py::dict& options, const std::optional<c10::intrusive_ptr<PythonBackend>>& world) {
  mooncake::refuseCaptureOfConstruction("the construction of a process group cannot be recorded");
  auto env = mooncake::EngineEnv::read();
  if (!env.ok()) mooncake::throwError(env.error());
  const auto groupEnv = mooncake::GroupEnv::read();
  if (!groupEnv.ok()) mooncake::throwError(groupEnv.error());
  const auto backendEnv = mooncake::BackendEnv::read();
  if (!backendEnv.ok()) mooncake::throwError(backendEnv.error());
  auto peerTable = peerTableOf(backendEnv->peerTable);
  if (!peerTable.ok()) mooncake::throwError(peerTable.error());
  BackendOptions out{.name = std::move(backendName),
                     .groupName = std::move(groupId),
                     .globalRanks = std::move(globalRanks),
                     .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout),
                     .env = std::move(*env),
                     .groupEnv = *groupEnv,
                     .raises = backendEnv->raises,
                     .streams = {.words = backendEnv->streamWords,
                                 .pinnedCache = backendEnv->pinnedCache,
                                 .graphMemory = backendEnv->graphMemory,
                                 .peerBytes = backendEnv->peerBytes,
                                 .peerTable = std::move(*peerTable)},
                     .blockingWait = backendEnv->blockingWait};
  // Later groups share the default group's engine. torch numbers their ranks as the default group
  // does, which may have become smaller than the job.
  if (world) {
    options.attr("pop")("engine", py::none());
    for (int& r : out.globalRanks) r = (*world)->group().jobRank(r);
  }
  apply(options, out);
  py::gil_scoped_release unlocked;
  return c10::make_intrusive<PythonBackend>(store, rank, size, std::move(out),
                                            world ? world->get() : nullptr);
}

std::chrono::milliseconds seconds(double count) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(count));
}

// (rank, kind, detail, seconds on CLOCK_MONOTONIC)
std::vector<std::tuple<int, std::string, std::string, double>> evidenceOf(
    const PythonBackend& backend) {
  std::vector<std::tuple<int, std::string, std::string, double>> all;
  for (auto& seen : backend.facts().evidence()) {
    const std::chrono::duration<double> when = seen.when.time_since_epoch();
    all.emplace_back(seen.rank, std::move(seen.kind), std::move(seen.detail), when.count());
  }
  return all;
}

PyObject* pythonClassOf(ErrorCode code) {
  const char* name = "PeerLostError";
  if (code == ErrorCode::kInputsLost) name = "InputsLostError";
  if (code == ErrorCode::kEvicted) name = "EvictedError";
  if (code == ErrorCode::kMinority) name = "MinorityError";
  return py::module_::import("mooncake_backend.errors").attr(name).ptr();
}

// Translates exceptions from functions that torch binds without its own handling of errors.
void raiseFailure(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (FailureError& failure) {
    PyErr_SetString(failure.python_type(), failure.what());
  } catch (python_error& raised) {
    raised.restore();
  }
}

void checkMessage(const PythonBackend& backend, bool isSend, const at::Tensor& tensor, int peer,
                  int tag) {
  backend.messages().check(isSend ? c10d::OpType::SEND : c10d::OpType::RECV, {tensor}, peer, tag);
}

// batch_isend_irecv reads this first: true puts its messages into one work.
py::object supportsCoalescing(const py::object& backend) {
  return py::module_::import("mooncake_backend.batches").attr("are_one_work")(backend);
}

// Called on Python's main thread, with or without the lock.
RaisedBySignal runSignalHandlers() {
#if PY_VERSION_HEX >= 0x030D0000
  const bool isOver = Py_IsFinalizing();
#else
  const bool isOver = _Py_IsFinalizing();
#endif
  if (isOver || !Py_IsInitialized()) return {};
  const PyGILState_STATE state = PyGILState_Ensure();
  RaisedBySignal result;
  if (PyErr_CheckSignals() != 0) {
    python_error raised;
    raised.persist();
    result.name = py::handle(raised.type).attr("__name__").cast<std::string>();
    result.exception = std::make_exception_ptr(std::move(raised));
  }
  PyGILState_Release(state);
  return result;
}

template <auto kAsk, typename... Arguments>
auto fact() {
  return [](const PythonBackend& backend, Arguments... arguments) {
    return (backend.facts().*kAsk)(arguments...);
  };
}

// While Python ends, it ends every thread that asks for its lock, and the process with it. So
// callbacks must end first. Returns false if they did not within `seconds`.
bool drainCompletions(double seconds) {
  const std::chrono::duration<double> most(seconds);
  return mooncake::drainAll(Deadline::after(std::chrono::duration_cast<Clock::duration>(most)));
}

// Tells whether the process ends with an error.
Farewell farewellOf(const std::optional<std::string>& failure) {
  if (failure) return {Farewell::How::kFailed, *failure};
  return {Farewell::How::kEnded, ""};
}

// Replaces torch's exception(), which cannot convert the exception to Python.
py::object exceptionOf(c10d::Work& work) {
  const std::exception_ptr thrown = work.exception();
  if (!thrown) return py::none();
  try {
    std::rethrow_exception(thrown);
  } catch (FailureError& failure) {
    return py::reinterpret_borrow<py::object>(failure.python_type())(failure.what());
  } catch (const c10::Error& error) {
    return py::module_::import("torch.distributed")
        .attr("DistBackendError")(error.what_without_backtrace());
  }
}

// An operation on tensors of a device answers as the one on the host that it consists of.
void bindDeviceWork(py::module_& m) {
  py::class_<DeviceWork, c10::intrusive_ptr<DeviceWork>, c10d::Work> type(m, "DeviceWork");
  type.def("exception", &exceptionOf)
      .def("get_future", [](DeviceWork& work) { return mooncake::futureOf(work); })
      .def("is_success", &DeviceWork::isSuccess);
  for (const char* name : {"works", "contributors", "failed_ranks", "lost_ranks", "epoch",
                           "sequence_number", "max_group_size"}) {
    const bool isKnownBefore =
        std::set<std::string_view>{"works", "sequence_number", "max_group_size"}.contains(name);
    type.def_property_readonly(name, [name, isKnownBefore](const DeviceWork& work) -> py::object {
      if (!isKnownBefore) {
        const py::gil_scoped_release unlocked;
        work.awaitVerdict();
      }
      return py::cast(work.host()).attr(name);
    });
  }
}

template <auto kField>
auto fieldOfVerdict(const KernelWork& work) {
  MissingParts::noteRead();
  return work.verdict().*kField;
}

template <auto kGet, typename Work>
auto readLosses(const Work& work) {
  MissingParts::noteRead();
  return (work.*kGet)();
}

void bindKernelWork(py::module_& m) {
  using Verdict = KernelWork::Verdict;
  const auto field = [](auto get) {
    return py::cpp_function(get, py::call_guard<py::gil_scoped_release>());
  };
  py::class_<KernelWork, c10::intrusive_ptr<KernelWork>, c10d::Work>(m, "KernelWork")
      .def("exception", &exceptionOf)
      .def("is_success", &KernelWork::isSuccess)
      .def_property_readonly("contributors", field(&fieldOfVerdict<&Verdict::contributors>))
      .def_property_readonly("failed_ranks", field(&fieldOfVerdict<&Verdict::failedRanks>))
      .def_property_readonly("lost_ranks", field(&fieldOfVerdict<&Verdict::lostRanks>))
      .def_property_readonly("epoch", field(&fieldOfVerdict<&Verdict::epoch>))
      .def_property_readonly("sequence_number", &KernelWork::getSequencenumber)
      .def_property_readonly("max_group_size", &KernelWork::capacity);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // torch's classes must be registered before ours name them as bases.
  py::module_::import("torch.distributed");

  mooncake::setPythonClasses(&pythonClassOf);
  py::register_exception_translator(&raiseFailure);
  const py::object mainThread = py::module_::import("threading").attr("main_thread")();
  mooncake::setRunSignalHandlers(&runSignalHandlers,
                                 pthread_t(mainThread.attr("ident").cast<unsigned long>()));

#ifdef MOONCAKE_HAS_SYMMETRIC_MEMORY
  mooncake::registerSymmetricMemory([](const std::function<void()>& call) {
    std::optional<py::gil_scoped_release> unlocked;
    if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    call();
  });
#endif

  m.def("drain_completions", &drainCompletions, py::arg("seconds"),
        py::call_guard<py::gil_scoped_release>());
  m.def("build_info", [] {
    py::dict info;
    info["torch"] = MOONCAKE_TORCH_VERSION;
    info["version"] = MOONCAKE_VERSION;
    std::vector<std::string> transports;
    for (const auto& entry : mooncake::transportRegistry()) transports.emplace_back(entry.name);
    info["transports"] = transports;
    info["kernels"] = mooncake::kernelImage().empty() ? "none, as nvcc was not found"
                                                      : std::to_string(mooncake::kKernelCount);
    return info;
  });
  m.def("describe_fabric", [] {
    const auto env = mooncake::FabricEnv::read();
    mooncake::throwIfError(env.status());
    std::vector<std::tuple<bool, std::string, std::string>> findings;
    for (const auto& [works, subject, text] : mooncake::reportFabric(*env))
      findings.emplace_back(works, subject, text);
    return findings;
  });
  m.def(
      "describe_accelerators",
      [](const std::string& name) {
        std::vector<std::tuple<bool, std::string, std::string>> findings;
        const auto opened = mooncake::openAccelerator(name);
        if (!opened.ok()) findings.emplace_back(false, name + " devices", opened.error().message);
        if (!opened.ok()) return findings;
        const bool hasKernels = !mooncake::kernelImage().empty();
        for (const auto& [works, subject, text] : mooncake::reportDevices(**opened, hasKernels))
          findings.emplace_back(works, subject, text);
        return findings;
      },
      py::arg("name"));
  m.def("create_backend", &createBackend, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("global_ranks"), py::arg("group_id"), py::arg("timeout"), py::arg("backend_name"),
        py::arg("options"), py::arg("world"));

  m.def(
      "dump_state_on_signal",
      [](int signal) { mooncake::throwIfError(mooncake::describeStatesOnSignal(signal)); },
      py::arg("signal"));

  m.def("group_of", &groupOf, py::arg("store"), py::arg("backend"), py::arg("devices"));

  const auto copied = [](const SplitOptions& options, const py::object&) {
    return c10::make_intrusive<SplitOptions>(options);
  };
  py::class_<SplitOptions, c10::intrusive_ptr<SplitOptions>, c10d::Backend::Options>(m,
                                                                                     "SplitOptions")
      .def("__deepcopy__", copied);

  py::class_<PythonBackend, c10::intrusive_ptr<PythonBackend>, c10d::Backend>(m, "MooncakeBackend")
      .def_property_readonly("active_ranks", py::cpp_function(
                                                 [](const PythonBackend& backend) {
                                                   return backend.facts().activeRanks();
                                                 },
                                                 py::call_guard<py::gil_scoped_release>()))
      .def_property_readonly("active_ranks_on_host", fact<&GroupFacts::activeRanksOnHost>())
      .def_property_readonly("options", &splitOptionsOf)
      // torch 2.8 defines it for its own backends only; newer versions for every backend.
      .def("_set_default_timeout", &PythonBackend::setTimeout, py::arg("timeout"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "leave_group",
          [](PythonBackend& backend, const std::optional<std::string>& failure) {
            backend.leaving().leaveGroup(farewellOf(failure).how);
          },
          py::arg("failure"), py::call_guard<py::gil_scoped_release>())
      .def(
          "leave_job",
          [](PythonBackend& backend, const std::optional<std::string>& failure) {
            backend.leaving().leaveJob(farewellOf(failure));
          },
          py::arg("failure"), py::call_guard<py::gil_scoped_release>())
      .def("evidence", &evidenceOf)
      .def("state", fact<&GroupFacts::state>(), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("epoch", fact<&GroupFacts::epoch>())
      .def_property_readonly("survivors", fact<&GroupFacts::survivors>())
      .def_property_readonly("supports_coalescing", &supportsCoalescing)
      .def("note_losses", &PythonBackend::noteLosses, py::arg("ranks"))
      .def(
          "acknowledge_loss",
          [](PythonBackend& backend) { return backend.host().acknowledgeLoss(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "recover_ranks",
          [](PythonBackend& backend, const std::vector<int>& ranks, double ready,
             const std::vector<uint64_t>& keys) {
            return backend.replacing().recover(ranks, seconds(ready), keys);
          },
          py::arg("ranks"), py::arg("ready"), py::arg("keys") = std::vector<uint64_t>(),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "deactivate_ranks",
          [](PythonBackend& backend, const std::vector<int>& ranks) {
            backend.replacing().deactivate(ranks);
          },
          py::arg("ranks"), py::call_guard<py::gil_scoped_release>())
      .def(
          "join_group", [](PythonBackend& backend) { backend.replacing().join(); },
          py::call_guard<py::gil_scoped_release>())
      .def("join_token",
           [](PythonBackend& backend) {
             const auto token = mooncake::encodeJoinToken(backend.facts().joinToken());
             return py::bytes(reinterpret_cast<const char*>(token.data()), token.size());
           })
      .def_property_readonly("series",
                             [](PythonBackend& backend) { return backend.group().line().series(); })
      .def_property_readonly(
          "is_newcomer", [](PythonBackend& backend) { return backend.group().line().isNewcomer(); })
      .def("size", [](PythonBackend& backend) { return backend.group().size(); })
      .def_property_readonly("room", [](PythonBackend& backend) { return backend.group().room(); })
      .def("show_losses", [](PythonBackend& backend) { backend.group().showLosses(); })
      .def_property_readonly("job_ranks", fact<&GroupFacts::jobRanks>())
      .def_property_readonly(
          "is_removed", [](PythonBackend& backend) { return backend.group().line().isRemoved(); })
      .def(
          "ready_key",
          [](PythonBackend& backend, int rank) { return backend.replacing().readyKey(rank); },
          py::arg("rank"))
      .def_static("note_losses_read", &MissingParts::noteRead)
      .def("check_standing", fact<&GroupFacts::checkStanding>())
      .def("check_message", &checkMessage, py::arg("is_send"), py::arg("tensor"), py::arg("peer"),
           py::arg("tag"))
      .def_property_readonly("on_failure", fact<&GroupFacts::onFailure>())
      .def("transport_to", fact<&GroupFacts::transportTo, int>(), py::arg("rank"));

  mooncake::bindTransfer(m);
  mooncake::bindEp(m);
  mooncake::bindFutures(m);
#ifdef MOONCAKE_WITH_SIM
  mooncake::bindForTests(m);
#endif

  py::class_<CollectiveWork, c10::intrusive_ptr<CollectiveWork>, c10d::Work>(m, "CollectiveWork")
      .def("exception", &exceptionOf)
      .def("get_future", [](CollectiveWork& work) { return mooncake::futureOf(work); })
      .def("is_success", &CollectiveWork::isSuccess)  // torch's own logs a deprecation warning
      .def_property_readonly("contributors",
                             &readLosses<&CollectiveWork::contributors, CollectiveWork>)
      .def_property_readonly("failed_ranks",
                             &readLosses<&CollectiveWork::failedRanks, CollectiveWork>)
      .def_property_readonly("lost_ranks", &readLosses<&CollectiveWork::lostRanks, CollectiveWork>)
      .def_property_readonly("epoch", &readLosses<&CollectiveWork::epoch, CollectiveWork>)
      .def_property_readonly("sequence_number", &CollectiveWork::getSequencenumber)
      .def_property_readonly("max_group_size", &CollectiveWork::capacity);
  py::class_<MessageWork, c10::intrusive_ptr<MessageWork>, c10d::Work>(m, "MessageWork")
      .def("exception", &exceptionOf)
      .def("get_future", [](MessageWork& work) { return mooncake::futureOf(work); })
      .def("is_success", &MessageWork::isSuccess)
      .def_property_readonly("failed_ranks", &MessageWork::failedRanks)
      .def_property_readonly("lost_ranks", &MessageWork::failedRanks)
      .def_property_readonly("max_group_size", &MessageWork::capacity);
  py::class_<BatchWork, c10::intrusive_ptr<BatchWork>, c10d::Work>(m, "BatchWork")
      .def("exception", &exceptionOf)
      .def("get_future", [](BatchWork& work) { return mooncake::futureOf(work); })
      .def("is_success", &BatchWork::isSuccess)
      .def_property_readonly("works", &BatchWork::works)
      .def_property_readonly("lost_ranks", &readLosses<&BatchWork::lostRanks, BatchWork>)
      .def_property_readonly("max_group_size", &BatchWork::capacity);
  bindDeviceWork(m);
  bindKernelWork(m);
}
