#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/checksum/digest.hpp"
#include "datastates/executor.hpp"
#include "datastates/memory/cuda.hpp"
#include "plain_pickle.hpp"
#include "tensor_scan.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

using Timeout = std::optional<double>;
using Streams = std::vector<std::pair<int, std::uint64_t>>;
using Frame = std::tuple<py::bytes, py::bytes, std::uint64_t, bool>;

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
        {
            const py::gil_scoped_release release;
            done = wait(last ? *end : slice);
        }
        if (done || last) return done;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

Buffers make_buffers(const py::array& ptr, const py::array& device, const py::array& stream) {
    return {.address = copy_elements<std::uint64_t>(ptr, "ptr"),
            .device = copy_elements<std::int32_t>(device, "device"),
            .stream = copy_elements<std::uint64_t>(stream, "stream"),
            .witness = {}};
}

void raise_native_error(const Error& error, const py::object& type) {
    py::object value = type(error.what());
    value.attr("code") = std::string(to_string(error.code()));
    value.attr("errno") = error.error_number();
    value.attr("op") = error.op();
    value.attr("path") = error.path();
    value.attr("record") = error.record();
    PyErr_SetObject(type.ptr(), value.ptr());
}

void bind_errors(py::module_& module) {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
    storage.call_once_and_store_result([&] {
        return py::reinterpret_steal<py::object>(
            PyErr_NewException("datastates._native.NativeError", nullptr, nullptr));
    });
    module.attr("NativeError") = storage.get_stored();
    py::register_local_exception_translator([](std::exception_ptr caught) {
        try {
            if (caught) std::rethrow_exception(std::move(caught));
        } catch (const Error& error) {
            raise_native_error(error, storage.get_stored());
        }
    });
}

py::bytes crc32_shift(const py::array& raw, const py::array& nbytes) {
    const auto raws = elements<std::uint32_t>(raw, "raw");
    const auto lengths = elements<std::uint64_t>(nbytes, "nbytes");
    if (raws.size() != lengths.size()) throw Error::invalid("raw and nbytes differ in length");
    std::vector<std::uint32_t> shifted(raws.size());
    for (std::size_t i = 0; i < raws.size(); ++i) {
        shifted[i] = Crc32Shift(lengths[i]).shift(raws[i]);
    }
    return to_bytes(shifted);
}

DigestRunsArrays runs_arrays(std::uint64_t digests, const py::array& offset,
                             const py::array& length, const py::array& run_length,
                             const py::array& after, const py::array& step,
                             const py::array& digest) {
    using U64 = std::uint64_t;
    return {.digests = digests,
            .offset = elements<U64>(offset, "runs_offset"),
            .length = elements<U64>(length, "runs_length"),
            .run_length = elements<U64>(run_length, "runs_run_length"),
            .after = elements<U64>(after, "runs_after"),
            .step = elements<U64>(step, "runs_step"),
            .digest = elements<std::uint32_t>(digest, "runs_digest")};
}

/// A sweep that owns its runs and digests. Thread-safe, by a mutex.
class Digester {
  public:
    explicit Digester(const DigestRunsArrays& arrays)
        : runs_(make_runs(arrays)), digests_(arrays.digests), sweep_(runs_, 0, digests_) {
        require_runs(runs_, std::numeric_limits<std::uint64_t>::max(), digests_.size());
    }

    void update(std::span<const std::byte> data) {
        const std::scoped_lock lock(mutex_);
        sweep_.update(data);
    }
    std::vector<std::uint32_t> finish() {
        const std::scoped_lock lock(mutex_);
        sweep_.finish();
        return {digests_.begin(), digests_.end()};
    }

  private:
    std::mutex mutex_;
    std::vector<DigestRuns> runs_;
    std::vector<std::atomic<std::uint32_t>> digests_;
    DigestSweep sweep_;
};

void bind_digester(py::module_& module) {
    py::class_<Digester>(module, "Digester")
        .def(py::init([](std::uint64_t digests, const py::array& offset, const py::array& length,
                         const py::array& run_length, const py::array& after, const py::array& step,
                         const py::array& digest) {
                 return std::make_unique<Digester>(
                     runs_arrays(digests, offset, length, run_length, after, step, digest));
             }),
             py::kw_only(), "digests"_a, "offset"_a, "length"_a, "run_length"_a, "after"_a,
             "step"_a, "digest"_a)
        .def(
            "update",
            [](Digester& digester, const py::buffer& data) {
                const BytesView view(data);
                const py::gil_scoped_release release;
                digester.update(view.bytes());
            },
            "data"_a)
        .def("finish", [](Digester& digester) { return to_bytes(digester.finish()); });
}

void bind_functions(py::module_& module) {
    module.def(
        "crc32",
        [](const py::buffer& data, std::uint32_t value) {
            const BytesView view(data);
            const py::gil_scoped_release release;
            return crc32(value, view.bytes());
        },
        "data"_a, "value"_a = 0);
    module.def("in_memory", &File::in_memory, "path"_a, py::call_guard<py::gil_scoped_release>());
    module.def("look", &look, "arrays"_a, "memory_of"_a, "plain"_a);
    module.def("layout", &layout, "arrays"_a);
    module.def(
        "read_plain_pickle",
        [](const py::bytes& opcodes, const py::list& keys, const py::tuple& kinds,
           const py::tuple& dtypes, const std::vector<Frame>& frames, const py::array& kind,
           const py::array& dtype, const py::array& record, const py::array& record_nbytes,
           const py::array& offset, const py::array& ndim, const py::array& dims,
           const py::array& strides, const py::object& reference, const py::object& ordered_dict) {
            ArrayRows rows{.keys = keys,
                           .kinds = kinds,
                           .dtypes = dtypes,
                           .frames = {},
                           .kind = elements<std::uint8_t>(kind, "kind"),
                           .dtype = elements<std::uint8_t>(dtype, "dtype"),
                           .record = elements<std::uint32_t>(record, "record"),
                           .record_nbytes = elements<std::uint64_t>(record_nbytes, "record_nbytes"),
                           .offset = elements<std::uint64_t>(offset, "offset"),
                           .ndim = elements<std::uint8_t>(ndim, "ndim"),
                           .dims = elements<std::uint64_t>(dims, "dims"),
                           .strides = elements<std::uint64_t>(strides, "strides")};
            for (const auto& [head, tail, itemsize, typed] : frames) {
                rows.frames.push_back({std::string(head), std::string(tail), itemsize, typed});
            }
            return read_plain_pickle(opcodes, rows, reference, ordered_dict);
        },
        "opcodes"_a, py::kw_only(), "keys"_a, "kinds"_a, "dtypes"_a, "frames"_a, "kind"_a,
        "dtype"_a, "record"_a, "record_nbytes"_a, "offset"_a, "ndim"_a, "dims"_a, "strides"_a,
        "reference"_a, "ordered_dict"_a);
    module.def("crc32_combine", &crc32_combine, "first"_a, "second"_a, "second_length"_a);
    module.def("crc32_shift", &crc32_shift, "raw"_a, "nbytes"_a);
    module.def("arm_fault", &fault::arm, "point"_a, "action"_a, "value"_a = 0, "nth"_a = 1,
               "count"_a = 0);
    module.def("clear_faults", &fault::clear);
    module.def("cuda_device_count", &cuda::device_count, py::call_guard<py::gil_scoped_release>());
}

void bind_plans(py::module_& module) {
    py::class_<WritePlan, std::shared_ptr<WritePlan>>(module, "WritePlan")
        .def(py::init([](const py::array& source_nbytes, std::uint64_t chunk_bytes,
                         const py::buffer& literal, const py::array& extent_offset,
                         const py::array& extent_length, const py::array& extent_piece,
                         const py::array& piece_source, const py::array& piece_source_offset,
                         const py::array& piece_extent_offset, const py::array& piece_length,
                         const py::array& patch_extent, const py::array& patch_offset,
                         const py::array& patch_source, const py::array& eager,
                         std::uint64_t digests, const py::array& runs_source,
                         const py::array& runs_offset, const py::array& runs_length,
                         const py::array& runs_run_length, const py::array& runs_after,
                         const py::array& runs_step, const py::array& runs_digest) {
                 using U64 = std::uint64_t;
                 using I32 = std::int32_t;
                 const BytesView literal_view(literal);
                 const WritePlanArrays arrays{
                     .source_nbytes = elements<U64>(source_nbytes, "source_nbytes"),
                     .chunk_bytes = chunk_bytes,
                     .literal = literal_view.bytes(),
                     .extent_offset = elements<U64>(extent_offset, "extent_offset"),
                     .extent_length = elements<U64>(extent_length, "extent_length"),
                     .extent_piece = elements<U64>(extent_piece, "extent_piece"),
                     .piece_source = elements<I32>(piece_source, "piece_source"),
                     .piece_source_offset =
                         elements<U64>(piece_source_offset, "piece_source_offset"),
                     .piece_extent_offset =
                         elements<U64>(piece_extent_offset, "piece_extent_offset"),
                     .piece_length = elements<U64>(piece_length, "piece_length"),
                     .patch_extent = elements<U64>(patch_extent, "patch_extent"),
                     .patch_offset = elements<U64>(patch_offset, "patch_offset"),
                     .patch_source = elements<I32>(patch_source, "patch_source"),
                     .eager = elements<std::uint8_t>(eager, "eager"),
                     .runs_source = elements<I32>(runs_source, "runs_source"),
                     .runs = runs_arrays(digests, runs_offset, runs_length, runs_run_length,
                                         runs_after, runs_step, runs_digest)};
                 const py::gil_scoped_release release;
                 return std::make_shared<WritePlan>(arrays);
             }),
             py::kw_only(), "source_nbytes"_a, "chunk_bytes"_a = 262144, "literal"_a,
             "extent_offset"_a, "extent_length"_a, "extent_piece"_a, "piece_source"_a,
             "piece_source_offset"_a, "piece_extent_offset"_a, "piece_length"_a, "patch_extent"_a,
             "patch_offset"_a, "patch_source"_a, "eager"_a, "digests"_a, "runs_source"_a,
             "runs_offset"_a, "runs_length"_a, "runs_run_length"_a, "runs_after"_a, "runs_step"_a,
             "runs_digest"_a);
    py::class_<ReadPlan, std::shared_ptr<ReadPlan>>(module, "ReadPlan")
        .def(py::init([](const py::array& dest_nbytes, const py::array& extent_offset,
                         const py::array& extent_length, const py::array& extent_span,
                         const py::array& span_offset, const py::array& span_length,
                         const py::array& extent_piece, const py::array& piece_dest,
                         const py::array& piece_dest_offset, const py::array& piece_extent_offset,
                         const py::array& piece_length, const py::array& extent_check,
                         const py::array& check_offset, const py::array& check_length,
                         const py::array& check_crc, const py::array& check_record) {
                 using U64 = std::uint64_t;
                 using I32 = std::int32_t;
                 const ReadPlanArrays arrays{
                     .dest_nbytes = elements<U64>(dest_nbytes, "dest_nbytes"),
                     .extent_offset = elements<U64>(extent_offset, "extent_offset"),
                     .extent_length = elements<U64>(extent_length, "extent_length"),
                     .extent_span = elements<U64>(extent_span, "extent_span"),
                     .span_offset = elements<U64>(span_offset, "span_offset"),
                     .span_length = elements<U64>(span_length, "span_length"),
                     .extent_piece = elements<U64>(extent_piece, "extent_piece"),
                     .piece_dest = elements<I32>(piece_dest, "piece_dest"),
                     .piece_dest_offset = elements<U64>(piece_dest_offset, "piece_dest_offset"),
                     .piece_extent_offset =
                         elements<U64>(piece_extent_offset, "piece_extent_offset"),
                     .piece_length = elements<U64>(piece_length, "piece_length"),
                     .extent_check = elements<U64>(extent_check, "extent_check"),
                     .check_offset = elements<U64>(check_offset, "check_offset"),
                     .check_length = elements<U64>(check_length, "check_length"),
                     .check_crc = elements<std::uint32_t>(check_crc, "check_crc"),
                     .check_record = elements<I32>(check_record, "check_record")};
                 const py::gil_scoped_release release;
                 return std::make_shared<ReadPlan>(arrays);
             }),
             py::kw_only(), "dest_nbytes"_a, "extent_offset"_a, "extent_length"_a, "extent_span"_a,
             "span_offset"_a, "span_length"_a, "extent_piece"_a, "piece_dest"_a,
             "piece_dest_offset"_a, "piece_extent_offset"_a, "piece_length"_a, "extent_check"_a,
             "check_offset"_a, "check_length"_a, "check_crc"_a, "check_record"_a);
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

/// Spans for Python: (stage, track, begin, end, bytes). Times are as of time.monotonic(), which is
/// CLOCK_MONOTONIC like our clock.
py::list spans(const Timeline& timeline) {
    const auto seconds = [](Clock::time_point time) {
        return std::chrono::duration<double>(time.time_since_epoch()).count();
    };
    py::list result;
    for (const Span& span : timeline.spans()) {
        result.append(py::make_tuple(std::string(to_string(span.stage)), span.track,
                                     seconds(span.begin), seconds(span.end), span.bytes));
    }
    return result;
}

void bind_jobs(py::module_& module) {
    // Destroying a job waits for threads.
    py::class_<WriteJob>(module, "WriteJob", py::release_gil_before_calling_cpp_dtor())
        .def_property_readonly("made", &WriteJob::made)
        .def(
            "wait_made",
            [](const WriteJob& job, const Timeout& timeout) {
                return wait_interruptibly(timeout, [&](auto end) { return job.wait_made(end); });
            },
            "timeout"_a = py::none())
        .def(
            "wait_captured",
            [](const WriteJob& job, const Timeout& timeout) {
                return wait_interruptibly(timeout,
                                          [&](auto end) { return job.wait_captured(end); });
            },
            "timeout"_a = py::none())
        .def(
            "wait_checksummed",
            [](const WriteJob& job, const Timeout& timeout) {
                return wait_interruptibly(timeout,
                                          [&](auto end) { return job.wait_checksummed(end); });
            },
            "timeout"_a = py::none())
        .def(
            "gate",
            [](const WriteJob& job, const Streams& streams, const Timeout& timeout) {
                return wait_interruptibly(timeout,
                                          [&](auto end) { return job.gate(streams, end); });
            },
            "streams"_a, "timeout"_a = py::none())
        .def("torn", &WriteJob::torn)
        .def("checksums",
             [](const WriteJob& job) {
                 if (!job.checksummed()) throw Error::invalid("checksums are not known yet");
                 return py::make_tuple(to_bytes(job.source_crcs()), to_bytes(job.chunk_crcs()));
             })
        .def("digests",
             [](const WriteJob& job) {
                 if (!job.checksummed()) throw Error::invalid("digests are not known yet");
                 return to_bytes(job.digests());
             })
        .def(
            "finish",
            [](WriteJob& job, const py::buffer& tail) {
                const BytesView view(tail);
                wait_interruptibly(std::nullopt, [&](auto end) { return job.wait_written(end); });
                const py::gil_scoped_release release;
                job.finish(view.bytes());
            },
            "tail"_a)
        .def("abort", &WriteJob::abort, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("captured", &WriteJob::captured)
        .def_property_readonly("written", &WriteJob::written)
        .def("stats", &write_stats)
        .def("timeline", [](const WriteJob& job) { return spans(job.timeline()); });
    py::class_<ReadJob>(module, "ReadJob", py::release_gil_before_calling_cpp_dtor())
        .def(
            "wait",
            [](const ReadJob& job, const Timeout& timeout) {
                return wait_interruptibly(timeout, [&](auto end) { return job.wait(end); });
            },
            "timeout"_a = py::none())
        .def("stats", &read_stats)
        .def("timeline", [](const ReadJob& job) { return spans(job.timeline()); });
    py::class_<ReadAhead>(module, "ReadAhead", py::release_gil_before_calling_cpp_dtor())
        .def_property_readonly("bytes_read", &ReadAhead::bytes_read)
        .def("wait", &ReadAhead::wait, py::call_guard<py::gil_scoped_release>())
        .def("close", &ReadAhead::close, py::call_guard<py::gil_scoped_release>());
}

void bind_executor(py::module_& module) {
    py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor",
                                                    py::release_gil_before_calling_cpp_dtor())
        .def(py::init([](std::size_t cache_bytes, std::size_t block_bytes, unsigned queue_depth,
                         const std::string& backend, bool direct, unsigned io_threads,
                         std::uint64_t device_cache_bytes) {
                 const py::gil_scoped_release release;
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
        .def("reserve", &Executor::reserve, "nbytes"_a, py::call_guard<py::gil_scoped_release>())
        .def("prepare_device", &Executor::prepare_device, "device"_a,
             py::call_guard<py::gil_scoped_release>())
        .def(
            "submit_write",
            [](Executor& executor, const std::string& path, std::shared_ptr<WritePlan> plan,
               const py::array& ptr, const py::array& device, const py::array& stream,
               const py::array& witness) {
                Buffers sources = make_buffers(ptr, device, stream);
                sources.witness = copy_elements<std::uint8_t>(witness, "witness");
                const py::gil_scoped_release release;
                return executor.submit_write(path, std::move(plan), std::move(sources));
            },
            "path"_a, "plan"_a, "ptr"_a, "device"_a, "stream"_a, "witness"_a)
        .def(
            "submit_read",
            [](Executor& executor, const std::string& path, std::shared_ptr<ReadPlan> plan,
               const py::array& ptr, const py::array& device, const py::array& stream,
               ReadAhead* ahead) {
                Buffers dests = make_buffers(ptr, device, stream);
                const py::gil_scoped_release release;
                return executor.submit_read(path, std::move(plan), std::move(dests), ahead);
            },
            "path"_a, "plan"_a, "ptr"_a, "device"_a, "stream"_a, "ahead"_a = py::none())
        .def(
            "read_ahead",
            [](Executor& executor, const std::string& path, std::shared_ptr<ReadPlan> plan) {
                return executor.read_ahead(path, std::move(plan));
            },
            "path"_a, "plan"_a, py::call_guard<py::gil_scoped_release>())
        .def("close", &Executor::close, py::call_guard<py::gil_scoped_release>())
        .def("abandon", &Executor::abandon);
}

}  // namespace
}  // namespace datastates::python

PYBIND11_MODULE(_native, module) {
    module.doc() = "The native core of datastates: the executor and its checksums.";
    datastates::python::bind_errors(module);
    datastates::python::bind_functions(module);
    datastates::python::bind_digester(module);
    datastates::python::bind_plans(module);
    datastates::python::bind_jobs(module);
    datastates::python::bind_executor(module);
}
