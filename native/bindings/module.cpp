#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/memory/cuda.hpp"
#include "plain_pickle.hpp"
#include "python_file.hpp"
#include "tensor_scan.hpp"
#include "walks.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

using Frame = std::tuple<py::bytes, py::bytes, std::uint64_t, bool>;

/// A path, or a message with one, as `os.fsdecode` gives it: it need not be UTF-8.
py::str decoded(std::string_view text) {
    const auto nbytes = static_cast<py::ssize_t>(text.size());
    auto made =
        py::reinterpret_steal<py::str>(PyUnicode_DecodeFSDefaultAndSize(text.data(), nbytes));
    if (!made) throw py::error_already_set();
    return made;
}

/// The Python error for an error of the core.
py::object to_python(const Error& error) {
    const py::str message = decoded(error.what());
    switch (error.code()) {
        case ErrorCode::cuda:
            return errors().attr("DeviceError")(message);
        case ErrorCode::corrupt:
            return errors().attr("FormatError")(message);
        case ErrorCode::closed:
        case ErrorCode::cancelled:
            return errors().attr("ClosedError")(message);
        case ErrorCode::invalid:
            return errors().attr("DatastatesError")(message);
        case ErrorCode::io:
            break;
    }
    return errors().attr("StorageError")(error.error_number(), error.op(), decoded(error.path()),
                                         message);
}

void raise(const py::object& error) {
    PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
}

void bind_errors() {
    py::register_local_exception_translator([](std::exception_ptr caught) {
        try {
            if (caught) std::rethrow_exception(std::move(caught));
        } catch (const Error& error) {
            raise(to_python(error));
        } catch (const std::system_error& error) {  // of start_thread() alone
            const std::string message = "the native core: " + std::string(error.what());
            raise(errors().attr("ThreadStartError")(message));
        }
    });
}

void bind_functions(py::module_& module) {
    module.def("look", &look, "arrays"_a, "known"_a, "memory_of"_a, "is_negated"_a, "plain"_a);
    module.def("layout", &layout, "arrays"_a, "is_negated"_a);
    module.def("split", &split, "form"_a, "value"_a, "is_plain"_a);
    module.def("module_tensors", &module_tensors, "module"_a, "base"_a);
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
    module.def("arm_fault", &fault::arm, "point"_a, "action"_a, "value"_a = 0, "nth"_a = 1,
               "count"_a = 0);
    module.def("clear_faults", &fault::clear);
    module.def("cuda_device_count", &cuda::device_count, py::call_guard<NoGil>());
}

}  // namespace

py::module_ errors() { return py::module_::import("datastates.errors"); }

void raise_corrupt(const Error& error, const py::object& key) {
    const py::str path = decoded(error.path());
    const auto text = "{!r} in {} does not match its checksum"_s.format(key, path);
    raise(errors().attr("CorruptError")(text, "key"_a = key, "path"_a = path));
    throw py::error_already_set();
}

}  // namespace datastates::python

PYBIND11_MODULE(_native, module) {
    module.doc() = "The native core of datastates: the executor and its checksums.";
    datastates::python::bind_errors();
    datastates::python::bind_functions(module);
    datastates::python::bind_descriptor(module);
    datastates::python::bind_checksums(module);
    datastates::python::bind_plans(module);
    datastates::python::bind_executor(module);
    datastates::python::bind_python_end();
}
