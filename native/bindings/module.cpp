#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/io/file.hpp"
#include "datastates/memory/cuda.hpp"
#include "plain_pickle.hpp"
#include "tensor_scan.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {
namespace {

using Frame = std::tuple<py::bytes, py::bytes, std::uint64_t, bool>;

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

void bind_functions(py::module_& module) {
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
    module.def("arm_fault", &fault::arm, "point"_a, "action"_a, "value"_a = 0, "nth"_a = 1,
               "count"_a = 0);
    module.def("clear_faults", &fault::clear);
    module.def("cuda_device_count", &cuda::device_count, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

}  // namespace datastates::python

PYBIND11_MODULE(_native, module) {
    module.doc() = "The native core of datastates: the executor and its checksums.";
    datastates::python::bind_errors(module);
    datastates::python::bind_functions(module);
    datastates::python::bind_checksums(module);
    datastates::python::bind_plans(module);
    datastates::python::bind_executor(module);
}
