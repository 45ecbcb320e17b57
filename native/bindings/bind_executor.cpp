#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "python_file.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

using Timeout = std::optional<double>;
using Streams = std::vector<std::pair<int, std::uint64_t>>;

/// Waits without the GIL, in slices. Between slices Python handles signals.
template <typename Wait>
bool wait_interruptibly(const Timeout& timeout, Wait&& wait) {
    constexpr auto kSlice = std::chrono::milliseconds(100);
    // Longer than anybody waits, and within the clock's range.
    constexpr double kForever = 1e9;
    std::optional<Clock::time_point> end;
    if (timeout && !std::isnan(*timeout) && *timeout < kForever) {
        const std::chrono::duration<double> duration(std::max(*timeout, 0.0));
        end = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration);
    }
    for (;;) {
        const Clock::time_point slice = Clock::now() + kSlice;
        const bool last = end && *end <= slice;
        bool done = false;
        std::exception_ptr failure;
        {
            const NoGil released;  // see there: nothing else may be thrown in its scope
            try {
                done = wait(last ? *end : slice);
            } catch (const Error&) {
                failure = std::current_exception();
            }
        }
        if (failure) std::rethrow_exception(failure);
        if (done || last) return done;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

/// A method that waits as a job's method does.
auto waiting(bool (WriteJob::*wait)(Deadline) const) {
    return [wait](const WriteJob& job, const Timeout& timeout) {
        return wait_interruptibly(timeout, [&](auto end) { return (job.*wait)(end); });
    };
}

Buffers make_buffers(const py::array& ptr, const py::array& device, const py::array& stream) {
    return {.address = copy_elements<std::uint64_t>(ptr, "ptr"),
            .device = copy_elements<std::int32_t>(device, "device"),
            .stream = copy_elements<std::uint64_t>(stream, "stream"),
            .witness = {}};
}

/// A file's path, in bytes or text, or an object that hands over the bytes of a file.
ReadFrom read_from(const py::object& place) {
    if (py::isinstance<py::bytes>(place) || py::isinstance<py::str>(place)) {
        return place.cast<std::string>();
    }
    return std::make_unique<PythonFile>(place);
}

/// A file's path, in bytes or text, or what hands a file over.
WriteTo write_to(const py::object& place) {
    if (py::isinstance<Outlet>(place)) return place.cast<std::shared_ptr<Outlet>>();
    return place.cast<std::string>();
}

void bind_outlet(py::module_& module) {
    py::class_<HandedBytes>(module, "HandedBytes", py::buffer_protocol())
        .def_buffer([](HandedBytes& handed) {
            const auto bytes = handed.bytes();
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(bytes.data()),
                                   static_cast<py::ssize_t>(bytes.size()), true);
        })
        .def("__len__", [](const HandedBytes& handed) { return handed.bytes().size(); });
    py::class_<Outlet, std::shared_ptr<Outlet>>(module, "Outlet")
        .def(py::init<std::string>(), "name"_a)
        .def("__iter__", [](py::object outlet) { return outlet; })
        .def("__next__",
             [](Outlet& outlet) {
                 std::unique_ptr<HandedBytes> next;
                 wait_interruptibly(std::nullopt, [&](auto end) { return outlet.take(end, next); });
                 if (!next) throw py::stop_iteration();
                 return next;
             })
        .def("finish", &Outlet::finish, py::call_guard<NoGil>())
        .def(
            "fail",
            [](Outlet& outlet, int number, const std::string& operation, const std::string& path,
               const std::string& text) {
                const Error error(ErrorCode::io, number, operation, path, text);
                const NoGil released;
                outlet.fail(error);
            },
            "number"_a, "operation"_a, "path"_a, "text"_a);
}

py::dict write_stats(const WriteJob& job) {
    const WriteStats stats = job.stats();
    return py::dict("bytes"_a = stats.bytes, "extents"_a = stats.extents,
                    "capture_seconds"_a = stats.capture_seconds, "direct"_a = stats.direct,
                    "backend"_a = job.backend_name(), "pinned"_a = job.pinned(),
                    "device_cache_bytes"_a = stats.device_cache_bytes,
                    "evacuate_seconds"_a = stats.evacuate_seconds,
                    "dropped_spans"_a = job.timeline().dropped());
}

py::dict read_stats(const ReadJob& job) {
    const ReadStats stats = job.stats();
    return py::dict("bytes_needed"_a = stats.bytes_needed, "bytes_read"_a = stats.bytes_read,
                    "in_place_bytes"_a = stats.in_place_bytes,
                    "cached_bytes"_a = stats.cached_bytes, "seconds"_a = stats.seconds,
                    "direct"_a = stats.direct, "backend"_a = job.backend_name(),
                    "dropped_spans"_a = job.timeline().dropped());
}

template <typename T>
py::array_t<T> column(const std::vector<T>& values) {
    return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

/// Spans for Python in columns: stage, track, begin, end, bytes. Times are as of time.monotonic(),
/// which is CLOCK_MONOTONIC like our clock.
py::tuple spans(const Timeline& timeline) {
    const auto seconds = [](Clock::time_point time) {
        return std::chrono::duration<double>(time.time_since_epoch()).count();
    };
    std::vector<std::uint8_t> stage;
    std::vector<std::uint32_t> track;
    std::vector<double> begin;
    std::vector<double> end;
    std::vector<std::uint64_t> bytes;
    {
        const NoGil released;
        for (const Span& span : timeline.spans()) {
            stage.push_back(static_cast<std::uint8_t>(span.stage));
            track.push_back(span.track);
            begin.push_back(seconds(span.begin));
            end.push_back(seconds(span.end));
            bytes.push_back(span.bytes);
        }
    }
    return py::make_tuple(column(stage), column(track), column(begin), column(end), column(bytes));
}

py::tuple stage_names() {
    py::tuple names(kStages);
    for (std::size_t i = 0; i < kStages; ++i) {
        names[i] = py::str(std::string(to_string(static_cast<Stage>(i))));
    }
    return names;
}

void bind_jobs(py::module_& module) {
    // Destroying a job waits for threads.
    py::class_<WriteJob>(module, "WriteJob", py::release_gil_before_calling_cpp_dtor())
        .def(
            "create",
            [](WriteJob& job, const py::object& place) {
                WriteTo to = write_to(place);
                const NoGil released;
                job.create(std::move(to));
            },
            "place"_a)
        .def_property_readonly("made", &WriteJob::made)
        .def("wait_made", waiting(&WriteJob::wait_made), "timeout"_a = py::none())
        .def("wait_captured", waiting(&WriteJob::wait_captured), "timeout"_a = py::none())
        .def("wait_checksummed", waiting(&WriteJob::wait_checksummed), "timeout"_a = py::none())
        .def(
            "gate",
            [](const WriteJob& job, const Streams& streams, const Timeout& timeout) {
                return wait_interruptibly(timeout,
                                          [&](auto end) { return job.gate(streams, end); });
            },
            "streams"_a, "timeout"_a = py::none())
        .def("torn", &WriteJob::torn)
        .def("replica_digests",
             [](const WriteJob& job) {
                 if (!job.wait_captured(Clock::now())) {
                     throw Error::invalid("the replicas are not digested yet");
                 }
                 return py::make_tuple(to_array(job.replicas().digests()), job.replicas().lost());
             })
        .def("checksums",
             [](const WriteJob& job) {
                 if (!job.checksummed()) throw Error::invalid("checksums are not known yet");
                 return py::make_tuple(to_array(job.source_crcs()), to_array(job.chunk_crcs()));
             })
        .def("digests",
             [](const WriteJob& job) {
                 if (!job.checksummed()) throw Error::invalid("digests are not known yet");
                 return to_array(job.digests());
             })
        .def(
            "finish",
            [](WriteJob& job, const py::buffer& tail) {
                const BytesView view(tail);
                job.hand_end(view.bytes());
                wait_interruptibly(std::nullopt, [&](auto end) { return job.wait_written(end); });
                const NoGil released;
                job.finish(view.bytes());
            },
            "tail"_a)
        .def("abort", &WriteJob::abort, py::call_guard<NoGil>())
        .def_property_readonly("captured", &WriteJob::captured)
        .def_property_readonly("written", &WriteJob::written)
        .def("stats", &write_stats)
        .def("timeline", [](const WriteJob& job) { return spans(job.timeline()); });
    py::class_<ReadJob>(module, "ReadJob", py::release_gil_before_calling_cpp_dtor())
        .def(
            "wait",
            [](const ReadJob& job, const py::function& name_record, const Timeout& timeout) {
                try {
                    return wait_interruptibly(timeout, [&](auto end) { return job.wait(end); });
                } catch (const Error& error) {
                    if (error.record() < 0) throw;
                    raise_corrupt(error, name_record(error.record()));
                }
            },
            "name_record"_a, "timeout"_a = py::none())
        .def("stop", &ReadJob::stop, py::call_guard<NoGil>())
        .def("end", &ReadJob::end, py::call_guard<NoGil>())
        .def("stats", &read_stats)
        .def("timeline", [](const ReadJob& job) { return spans(job.timeline()); });
    py::class_<HashJob>(module, "HashJob", py::release_gil_before_calling_cpp_dtor())
        .def(
            "wait",
            [](const HashJob& job, const Timeout& timeout) {
                return wait_interruptibly(timeout, [&](auto end) { return job.wait(end); });
            },
            "timeout"_a = py::none())
        .def_property_readonly(
            "hashes",
            [](const HashJob& job) {
                const std::vector<std::byte> hashes = job.hashes();
                constexpr auto kWidth = static_cast<py::ssize_t>(sizeof(hash::Hash));
                const auto rows = static_cast<py::ssize_t>(hashes.size()) / kWidth;
                return py::array_t<std::uint8_t>(
                    {rows, kWidth}, reinterpret_cast<const std::uint8_t*>(hashes.data()));
            })
        .def_property_readonly("lost", &HashJob::lost);
}

}  // namespace

void bind_executor(py::module_& module) {
    module.attr("STAGES") = stage_names();
    bind_outlet(module);
    bind_jobs(module);
    py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor",
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::size_t cache_bytes, std::size_t block_bytes, unsigned queue_depth,
                         const std::string& backend, bool direct, unsigned io_threads,
                         std::uint64_t device_cache_bytes) {
                 const NoGil released;
                 return Executor::make({.cache_bytes = cache_bytes,
                                        .block_bytes = block_bytes,
                                        .device_cache_bytes = device_cache_bytes,
                                        .queue_depth = queue_depth,
                                        .backend = backend,
                                        .direct = direct,
                                        .io_threads = io_threads});
             }),
             py::kw_only(), "cache_bytes"_a, "block_bytes"_a, "queue_depth"_a, "backend"_a,
             "direct"_a, "io_threads"_a, "device_cache_bytes"_a = 0)
        .def_property_readonly("backend", &Executor::backend_name)
        .def_property_readonly("cache_bytes", &Executor::cache_bytes)
        .def_property_readonly("block_bytes", &Executor::block_bytes)
        .def_property_readonly("pinned", &Executor::pinned)
        .def("prepare_cache", &Executor::prepare_cache, "nbytes"_a, py::call_guard<NoGil>())
        .def("prepare_device", &Executor::prepare_device, "device"_a, py::call_guard<NoGil>())
        .def(
            "submit_write",
            [](Executor& executor, const std::optional<py::object>& place,
               std::shared_ptr<WritePlan> plan, const py::array& ptr, const py::array& device,
               const py::array& stream, const py::array& witness,
               std::shared_ptr<ReplicaRanges> replicas,
               const std::optional<py::array>& replica_ptr) {
                Buffers sources = make_buffers(ptr, device, stream);
                sources.witness = copy_elements<std::uint8_t>(witness, "witness");
                Replicas compared{.ranges = std::move(replicas), .addresses = {}};
                if (replica_ptr) {
                    compared.addresses = copy_elements<std::uint64_t>(*replica_ptr, "replica_ptr");
                }
                std::optional<WriteTo> to;
                if (place) to = write_to(*place);
                const NoGil released;
                return executor.submit_write(to, std::move(plan), std::move(sources),
                                             std::move(compared));
            },
            "place"_a, "plan"_a, "ptr"_a, "device"_a, "stream"_a, "witness"_a,
            "replicas"_a = py::none(), "replica_ptr"_a = py::none())
        .def(
            "submit_read",
            [](Executor& executor, const py::object& place, std::shared_ptr<ReadPlan> plan,
               const py::array& ptr, const py::array& device, const py::array& stream) {
                Buffers dests = make_buffers(ptr, device, stream);
                ReadFrom from = read_from(place);
                const NoGil released;
                return executor.submit_read(std::move(from), std::move(plan), std::move(dests));
            },
            "place"_a, "plan"_a, "ptr"_a, "device"_a, "stream"_a,
            py::keep_alive<0, 2>())  // the place, until the job has ended
        .def(
            "submit_hash",
            [](Executor& executor, const py::array& nbytes, const py::array& ptr,
               const py::array& device, const py::array& stream) {
                const auto lengths = copy_elements<std::uint64_t>(nbytes, "nbytes");
                const Buffers sources = make_buffers(ptr, device, stream);
                const NoGil released;
                return executor.submit_hash(lengths, sources);
            },
            "nbytes"_a, "ptr"_a, "device"_a, "stream"_a)
        .def("close", &Executor::close, py::call_guard<NoGil>())
        .def("abandon", &Executor::abandon);
}

}  // namespace datastates::python
